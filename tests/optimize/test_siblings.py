"""Convolutions that read the same images, as one."""

from collections.abc import Callable

import pytest
import torch
from rewriting import assert_same, counts, optimize, random_half, record, rewritten
from torch import Tensor, fx
from torch.nn import functional

from nimblec.kernels.products.gemm_match import requests
from nimblec.kernels.products.gemm_rewrite import use_triton_kernels
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.siblings import join_siblings
from nimblec.optimize.passes.channels_last import propagate_channels_last

TILING = Tiling(block_m=16, block_n=16, block_k=32)


IMAGES = random_half(2, 16, 6, 5, seed=0).contiguous(memory_format=torch.channels_last)
WEIGHT, BIAS = random_half(8, 16, 1, 1), random_half(8)


def _conv(x: Tensor, out: int, size: int = 1, *, bias: bool = True, seed: int = 3, **how: int) -> Tensor:
    weight = random_half(out, x.shape[1], size, size, seed=seed) / (x.shape[1] * size * size) ** 0.5
    return functional.conv2d(x, weight, random_half(out, seed=seed) if bias else None, padding=size // 2, **how)


def _block(x: Tensor) -> Tensor:
    """Apply three branches, the third of which something else reads as well, as in Inception."""
    first, second, third = (torch.relu(_conv(x, out, seed=out)) for out in (8, 24, 16))
    return _conv(first, 8, 3) + _conv(second, 8, 3) + _conv(third, 8, 3) * third.sum()


def _of_three(x: Tensor) -> Tensor:
    parts = [functional.silu(_conv(x, out, 3, bias=False, stride=2)) for out in (8, 16, 8)]
    return torch.cat([_conv(part, 8) for part in parts], 1)


def _after_a_norm(x: Tensor) -> Tensor:
    scale = (torch.arange(x.shape[1]) % 3 + 1).half()
    x = torch.relu(functional.batch_norm(_conv(x, 16) * x, scale, scale, scale / 4, scale.neg()))
    return _conv(_conv(x, 8), 8) + _conv(_conv(x, 16, seed=4), 8)


def _twice(x: Tensor) -> Tensor:
    """Siblings that siblings read, in one go: the inner ones have larger images to read."""
    left, right = torch.relu(_conv(x, 8)), torch.relu(_conv(x, 16))
    return sum(_conv(torch.relu(_conv(part, out, 3)), 8) for part in (left, right) for out in (8, 24))


def _beside_a_beginning(x: Tensor) -> Tensor:
    """Apply siblings, as in GoogLeNet, the first of which begins a concatenation, as another one does."""
    first, second, third, fourth = (_conv(x, out, seed=out) for out in (8, 16, 24, 32))
    return torch.cat([first, _conv(second, 8, 3), third], 1) + torch.cat([fourth, _conv(second, 8)], 1)


JOINED: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "block": (_block, 6, 5),
    "of three": (_of_three, 6, 4),
    "after a norm": (_after_a_norm, 5, 4),
    "twice": (_twice, 10, 7),
    "beside a beginning": (_beside_a_beginning, 6, 5),
}


def _graph(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    module = optimize(record(function, IMAGES), device="cuda")
    propagate_channels_last(module)
    return module


@pytest.mark.parametrize("name", JOINED)
def test_siblings_are_one_launch(name: str) -> None:
    function, before_count, after_count = JOINED[name]
    before = _graph(function)
    joined = rewritten(before, join_siblings)
    assert len([*requests(before)]) == before_count
    assert len([*requests(joined)]) == after_count
    assert_same(before, joined, IMAGES, rtol=2e-3)
    after = rewritten(joined, lambda module: use_triton_kernels(module, lambda _: TILING))
    assert counts(after)["convolution"] == after_count
    assert_same(before, after, IMAGES, rtol=4e-3)


def test_readers_take_part_of_the_channels_as_they_are() -> None:
    strides = [request.shape.pixel_stride for request in requests(rewritten(_graph(_of_three), join_siblings))]
    assert strides == [16, 32, 32, 32]


def _other_readers(x: Tensor) -> Tensor:
    return functional.max_pool2d(_conv(x, 8), 2).sum() + functional.max_pool2d(_conv(x, 8, seed=4), 2).sum()


def _read_elsewhere_too(x: Tensor) -> Tensor:
    first, second = _conv(x, 8), _conv(x, 8, seed=4)
    return _conv(first, 8) + _conv(second, 8) + first + second


def _also_their_residuals(x: Tensor) -> Tensor:
    """Add residuals, which if joined were parts of larger images: our kernels do not add those."""
    first, second = torch.relu(_conv(x, 8)), torch.relu(_conv(x, 8, seed=4))
    return torch.relu(_conv(first, 8) + first) + torch.relu(_conv(second, 8) + second)


def _shared_weights(x: Tensor) -> Tensor:
    first, second = functional.conv2d(x, WEIGHT, BIAS), functional.conv2d(x, WEIGHT, 2 * BIAS)
    return _conv(first, 8) + _conv(second, 8)


def _first_and_more(x: Tensor) -> Tensor:
    first = _conv(x, 8)
    return torch.cat([first, _conv(_conv(x, 16), 8, 3)], 1) + torch.cat([_conv(x, 8, 3), first], 1)


STAY: dict[str, Callable[[Tensor], Tensor]] = {
    "in the middle": lambda x: torch.cat(
        [functional.max_pool2d(x, 3, 1, 1), _conv(x, 8), _conv(_conv(x, 16), 8, 3)], 1
    ),
    "first and more": _first_and_more,
    "other readers": _other_readers,
    "other images": lambda x: _conv(_conv(x, 8), 8) + _conv(_conv(x.flip(2), 8, seed=4), 8),
    "other geometry": lambda x: _conv(_conv(x, 8), 8) + _conv(_conv(x, 8, 3), 8),
    "other activation": lambda x: _conv(torch.relu(_conv(x, 8)), 8) + _conv(functional.silu(_conv(x, 8, seed=4)), 8),
    "unaligned": lambda x: _conv(_conv(x, 7), 8) + _conv(_conv(x, 12, seed=4), 8),
    "residuals": lambda x: _conv(_conv(x, 16) + x, 8) + _conv(_conv(x, 16, seed=4) + x, 8),
    "read elsewhere too": _read_elsewhere_too,
    "also their residuals": _also_their_residuals,
    "shared weights": _shared_weights,
}


@pytest.mark.parametrize("function", STAY.values(), ids=STAY)
def test_what_is_no_sibling_stays(function: Callable[[Tensor], Tensor]) -> None:
    before = _graph(function)
    after = rewritten(before, join_siblings)
    assert counts(after) == counts(before)
    assert [r.signature for r in requests(after)] == [r.signature for r in requests(before)]
