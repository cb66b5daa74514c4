"""Everything that -O2 does to a graph, on random networks: equal results, whatever stands beside whatever."""

from collections.abc import Callable, Sequence

import pytest
import torch
from arithmetic import arithmetic
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import check, optimize, record, run, with_triton_kernels
from torch import Tensor
from torch.nn import functional

WIDTH = 16
Step = Callable[[Tensor, Tensor], Tensor]
"""Of two earlier values."""
ACTIVATIONS = (torch.relu, functional.silu, functional.gelu, functional.hardswish, torch.sigmoid, lambda x: x)


def _random(like: Tensor, *shape: int) -> Tensor:
    """Constants, which are equal for equal shapes, in the precision of ``like``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(like.dtype)


def _conv(x: Tensor, out: int = WIDTH, size: tuple[int, int] = (1, 1), groups: int = 1) -> Tensor:
    weight = _random(x, out, x.shape[1] // groups, *size) / (x.shape[1] // groups * size[0] * size[1]) ** 0.5
    bias = _random(x, out) if groups == 1 else None
    return torch.conv2d(x, weight, bias, padding=(size[0] // 2, size[1] // 2), groups=groups)


def _batch_norm(x: Tensor) -> Tensor:
    mean, variance = _random(x, x.shape[1]), _random(x, x.shape[1]).abs() + 0.5
    return torch.ops.aten._native_batch_norm_legit_no_training(x, variance, mean, mean, variance, 0.1, 1e-5)[0]


def _joined(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat([x, y], 1)
    return joined if joined.shape[1] <= 4 * WIDTH else torch.relu(_conv(_batch_norm(joined)))


def _inception(x: Tensor, y: Tensor) -> Tensor:
    deep = torch.relu(_conv(torch.relu(_conv(x)), 8, (3, 3)))
    deeper = torch.relu(_conv(_conv(torch.relu(_conv(x, 8)), 8, (1, 7)), 8, (7, 1)))
    return torch.cat([torch.relu(_conv(x)), deep, deeper, _conv(functional.avg_pool2d(y, 3, 1, 1), 8)], 1)


def _excited(x: Tensor, _: Tensor) -> Tensor:
    inner = torch.relu(_conv(x.mean((2, 3), keepdim=True), 8))
    return x * torch.sigmoid(_conv(inner, x.shape[1]))


def _inverted(x: Tensor, _: Tensor) -> Tensor:
    wide = functional.silu(_batch_norm(_conv(x, 32)))
    return x + _conv(_excited(torch.relu(_conv(wide, 32, (3, 3), groups=32)), x), x.shape[1])


def _halves(x: Tensor, _: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([_conv(first, 8, (3, 3)), second], 1)


def _images_as_tokens(x: Tensor, _: Tensor) -> Tensor:
    rows = functional.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), _random(x, x.shape[1]))
    return x + _linear(functional.gelu(_linear(rows, 32)), x.shape[1]).permute(0, 3, 1, 2)


IMAGES: tuple[Step, ...] = (
    lambda x, _: torch.relu(_batch_norm(_conv(x))),
    lambda x, _: functional.hardswish(_conv(x, 24, (3, 3))),
    lambda x, _: torch.relu(_conv(x, x.shape[1], (3, 3), groups=x.shape[1])),
    lambda x, _: functional.max_pool2d(x, 3, 1, 1),
    lambda x, y: torch.relu(_conv(x, y.shape[1]) + y),
    lambda x, y: _conv(x, 8, (3, 3)) * _conv(y, 8),
    lambda x, _: torch.relu(_batch_norm(x)),
    _joined,
    _joined,
    _inception,
    _inception,
    _excited,
    _inverted,
    _halves,
    _images_as_tokens,
)


def _linear(x: Tensor, out: int = WIDTH) -> Tensor:
    return functional.linear(x, _random(x, out, x.shape[-1]) / x.shape[-1] ** 0.5, _random(x, out))


def _layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), _random(x, WIDTH), _random(x, WIDTH))


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * _random(x, WIDTH)


def _attention(x: Tensor, y: Tensor) -> Tensor:
    rows = _layer_norm(x)
    heads = (_linear(t, 16).reshape(2, 9, 2, 8).transpose(1, 2) for t in (rows, rows, y))
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
    return x + _linear(mixed.transpose(1, 2).reshape(2, 9, 16))


def _attention_by_hand(x: Tensor, _: Tensor) -> Tensor:
    queries, keys, values = _linear(x, 48).reshape(2, 9, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = torch.softmax(queries @ keys.transpose(2, 3) / 8**0.5, -1) @ values
    return _layer_norm(x + _linear(mixed.transpose(1, 2).reshape(2, 9, 16)))


TOKENS: tuple[Step, ...] = (
    lambda x, _: _layer_norm(x),
    lambda x, _: _rms_norm(x),
    lambda x, _: _linear(x),
    lambda x, y: x + y,
    lambda x, y: x + _linear(functional.gelu(_linear(_layer_norm(y), 32))),
    lambda x, y: _layer_norm(y + _linear(torch.relu(_linear(x, 32)))),
    lambda x, _: x + _linear(functional.silu(_linear(_rms_norm(x), 24)) * _linear(_rms_norm(x), 24)),
    lambda x, y: _linear(_layer_norm(_linear(x))) + _linear(_layer_norm(y)),
    lambda x, _: functional.linear(x.transpose(1, 2), _random(x, 9, 9) / 3).transpose(1, 2) + x,
    _attention,
    _attention_by_hand,
)


def _check(data: st.DataObject, steps: Sequence[Step], x: Tensor) -> None:
    """Mostly the latest values are read, so that chains arise, and branches that join."""
    count = data.draw(st.integers(2, 8))
    chosen = [(data.draw(st.sampled_from(steps)), data.draw(st.sampled_from(ACTIVATIONS))) for _ in range(count)]
    back = st.sampled_from([0, 0, 0, 1, 2])
    reads = [(max(0, n - data.draw(back)), max(0, n - data.draw(back))) for n in range(count)]
    extra = data.draw(st.integers(1, count))

    def model(x: Tensor) -> list[Tensor]:
        values = [x]
        for (step, activation), (first, second) in zip(chosen, reads, strict=True):
            values.append(activation(step(values[first], values[second])))
        return [values[-1], values[extra]]

    truth = run(record(model, x.double()), x.double())
    for dtype, rounding in ((torch.float32, 1e-5), (torch.float16, 8e-3)):
        given = x.to(dtype)
        before = record(model, given)
        with arithmetic("fp32"):
            after = with_triton_kernels(optimize(before, device="cuda"))
        check(after)
        for wanted, old, new in zip(truth, run(before, given), run(after, given), strict=True):
            assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride())
            error_before, error_after = (float((t.double() - wanted).norm() / wanted.norm()) for t in (old, new))
            assert error_after <= 2 * error_before + rounding


@pytest.mark.timeout(900)  # minutes on a busy machine
@examples(25)
@given(data=st.data())
def test_any_network_of_images(data: st.DataObject) -> None:
    _check(data, IMAGES, torch.randn(2, WIDTH, 6, 6, generator=torch.Generator().manual_seed(0)))


@pytest.mark.timeout(900)  # minutes on a busy machine
@examples(25)
@given(data=st.data())
def test_any_network_of_tokens(data: st.DataObject) -> None:
    _check(data, TOKENS, torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0)))
