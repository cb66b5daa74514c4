"""Sums of convolutions of the same images, as one."""

from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import checked, counts, record, rewritten
from torch import Tensor
from torch.nn import functional

from nimblec.optimize.passes.batch_norm import fold_batch_norm
from nimblec.optimize.passes.branches import join_branches

aten = torch.ops.aten
IMAGES = torch.randn(2, 8, 9, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _conv(
    x: Tensor, size: int, *, out: int = 8, groups: int = 1, seed: int = 1, bias: bool = True, **how: int
) -> Tensor:
    weight = _random(out, x.shape[1] // groups, size, size, seed=seed)
    given = {"padding": size // 2, **how}
    return functional.conv2d(x, weight, _random(out, seed=seed) if bias else None, groups=groups, **given)


def _norm(x: Tensor, seed: int = 5) -> Tensor:
    mean, weight, bias = (_random(x.shape[1], seed=seed + n) for n in range(3))
    return functional.batch_norm(x, mean, mean.abs() + 0.5, weight, bias)


def _mobile_one(x: Tensor) -> Tensor:
    """Depthwise, over-parametrised: several branches of one size, the first of two sums of nothing."""
    total = _norm(x) + 0 + 0
    for seed in range(3):
        total = total + _norm(_conv(x, 3, groups=8, seed=seed), seed)
    return total + _norm(_conv(x, 1, groups=8))


def _rep_mixer(x: Tensor) -> Tensor:
    """Add a scaled difference to what came in, as in FastViT."""
    return x + _random(8, 1, 1) * (_conv(x, 7, groups=8) - _norm(x))


def _uneven(x: Tensor) -> Tensor:
    weight = _random(8, 8, 1, 3)
    return functional.conv2d(x, weight, padding=(0, 1)) + _conv(x, 3)


JOINED: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, int]]] = {
    "RepVGG": (
        lambda x: torch.relu(_norm(_conv(x, 3)) + _norm(_conv(x, 1, bias=False), 6) + _norm(x, 7)),
        {"convolution": 1, "relu": 1},
    ),
    "MobileOne": (_mobile_one, {"convolution": 1}),
    "RepMixer": (_rep_mixer, {"convolution": 1, "add": 1}),
    "taken off a norm": (lambda x: _norm(x) - _conv(x, 3), {"convolution": 1}),
    "halved": (lambda x: _conv(x, 3, stride=2) + _conv(x, 1, stride=2, bias=False), {"convolution": 1}),
    "grouped": (lambda x: _conv(x, 3, groups=2) + x * _random(8, 1, 1), {"convolution": 1}),
    "uneven": (_uneven, {"convolution": 1}),
}


@pytest.mark.parametrize("name", JOINED)
def test_branches_are_one_convolution(name: str) -> None:
    function, wanted = JOINED[name]
    assert counts(checked(function, IMAGES, fold_batch_norm, join_branches, rtol=1e-12)) == wanted


@examples(60)
@given(data=st.data())
def test_any_geometry(data: st.DataObject) -> None:
    """Where the sum exists at all, it comes out the same, joined or not."""
    number = st.integers
    groups, stride = data.draw(st.sampled_from([1, 2, 8])), data.draw(number(1, 2))
    sides = [
        (data.draw(number(1, 3)), data.draw(number(0, 3)), data.draw(number(1, 2)), data.draw(st.booleans()), seed)
        for seed in range(2)
    ]

    def branch(x: Tensor, size: int, padding: int, dilation: int, bias: bool, seed: int) -> Tensor:
        how = {"padding": padding, "dilation": dilation, "stride": stride}
        return _conv(x, size, groups=groups, bias=bias, seed=seed, **how)

    sizes = [branch(IMAGES, *side).shape for side in sides]
    if sizes[0] != sizes[1]:
        return
    after = checked(lambda x: branch(x, *sides[0]) - branch(x, *sides[1]), IMAGES, join_branches, rtol=1e-12)
    assert counts(after)["convolution"] in {1, 2}


def _used_elsewhere(x: Tensor) -> Tensor:
    left = _conv(x, 3)
    return (left + _conv(x, 1)) * left


def _broadcast_pixel(x: Tensor) -> Tensor:
    """Return a kernel as large as the images, whose one pixel is added to each of the other branch."""
    return functional.conv2d(x, _random(8, 8, 9, 7)) + _conv(x, 1)


STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "other images": lambda x: _conv(x, 3) + _conv(x.neg(), 1),
    "used elsewhere": _used_elsewhere,
    "other stride": lambda x: _conv(x, 3, stride=2).repeat(1, 1, 2, 2)[:, :, :9, :7] + _conv(x, 1),
    "other dilation": lambda x: _conv(x, 3, dilation=2, padding=2) + _conv(x, 3),
    "other place": lambda x: _conv(x, 3, padding=0) + _conv(x, 2, padding=0)[:, :, 1:, 1:],
    "plain residual": lambda x: x + _conv(x, 3),
    "broadcast": lambda x: _conv(x, 3, out=1) + _norm(x),
    "broadcast pixel": _broadcast_pixel,
    "weighted": lambda x: torch.add(_conv(x, 3), _conv(x, 1), alpha=2),
}


@pytest.mark.parametrize("function", STAY.values(), ids=STAY)
def test_what_is_no_such_sum_stays(function: Callable[[Tensor], Tensor]) -> None:
    before = rewritten(record(function, IMAGES), fold_batch_norm)
    assert counts(rewritten(before, join_branches)) == counts(before)


def test_weights_that_their_dtype_cannot_tell_apart_stay() -> None:
    large = torch.full((8, 1, 3, 3), 6e4).half()

    def model(x: Tensor) -> Tensor:
        return functional.conv2d(x, large, None, 1, 1, 1, 8) + functional.conv2d(x, large[:, :, 1:2, 1:2], groups=8)

    before = record(model, IMAGES.half())
    assert counts(rewritten(before, join_branches)) == counts(before)
