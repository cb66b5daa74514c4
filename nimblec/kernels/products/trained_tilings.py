"""How a convolution of trained weights and its gradients are divided into blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod

from nimblec.kernels.gpu import GPU
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_tilings import Tiling, candidates
from nimblec.kernels.shapes import Convolution, Pair, ceil_div, next_power_of_2
from nimblec.kernels.shapes import product as product_of
from nimblec.kernels.tilings import NumberedTiling

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FEWEST_SUMS, _MOST_SUMS = 4, 64
"""Float32 sums that a thread of a `DepthwiseSum` holds."""
_MOST_DEPTHWISE = 8
"""Candidates of a depthwise convolution or gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseSum(NumberedTiling):
    """A block sums ``block_c`` channels over one of ``split_k`` parts of the rows, ``block_m`` of them at a time."""

    block_m: int
    block_c: int
    split_k: int
    num_warps: int = 4

    @staticmethod
    def places(shape: Convolution) -> int:
        """Return how many sums a channel has: one for each of its weights, rounded up to a power of two."""
        return next_power_of_2(prod(shape.kernel))

    def tiles(self, shape: Convolution) -> Pair:
        """Return the number of tiles of the result: one down, some across."""
        return 1, ceil_div(shape.out_channels, self.block_c)

    def blocks(self, shape: Convolution) -> int:
        """Return how many blocks are launched."""
        return prod(self.tiles(shape)) * self.split_k

    def sums(self, shape: Convolution) -> int:
        """Return how many sums a thread holds."""
        return self.places(shape) * self.block_m * self.block_c // (32 * self.num_warps)


def image_product(shape: Convolution) -> Convolution:
    """Return the product of the images' gradient: a row for each pixel, over taps and results' channels."""
    return Convolution(
        batch=shape.batch * shape.height * shape.width,
        height=shape.kernel[0],
        width=shape.kernel[1],
        channels=shape.out_channels,
        out_channels=shape.channels,
        kernel=shape.kernel,
    )


def weight_product(shape: Convolution) -> Convolution:
    """Return the product of the weights' gradient: each sums over the pixels of all results."""
    return product_of(shape.out_channels, shape.rows, shape.depth)


def forward_candidates(shape: Convolution, gpu: GPU, *, itemsize: int) -> list[Tiling]:
    """Return tilings for the convolution itself."""
    return _wide_and_narrow(shape, gpu, itemsize)


def image_candidates(shape: Convolution, gpu: GPU, *, itemsize: int) -> list[Tiling]:
    """Return tilings for the gradient of a convolution's images."""
    return _wide_and_narrow(image_product(shape), gpu, itemsize)


def weight_candidates(shape: Convolution, gpu: GPU, *, itemsize: int) -> list[Tiling]:
    """Return tilings for the gradient of a convolution's weights."""
    return _wide_and_narrow(weight_product(shape), gpu, itemsize)


def _wide_and_narrow(shape: Convolution, gpu: GPU, itemsize: int) -> list[Tiling]:
    """Return the most promising tilings by the time model, and by one in which narrow tiles are as fast as wide ones.

    Wide tiles take float32 factors in one memory order only: a factor in the other one is copied 4 bytes at a time.
    """
    even = replace(gpu, speed=replace(gpu.speed, narrow=1))
    found = (candidates(shape, each, limit=6, itemsize=itemsize, splits=_SPLITS, alike=2) for each in (gpu, even))
    return list(dict.fromkeys(chain.from_iterable(found)))


def depthwise_forward_candidates(shape: Convolution, gpu: GPU, *, itemsize: int) -> list[DepthwiseTiling]:
    """Return tilings for a depthwise convolution itself.

    A thread computes some channels of one, two or four pixels: it reads their weights, which lie apart, only once.
    """
    vector, taps = 16 // itemsize, prod(shape.kernel)

    def pixels(tiling: DepthwiseTiling) -> float:
        return tiling.block_m * tiling.block_c / (32 * tiling.num_warps * vector)

    def cost(tiling: DepthwiseTiling) -> tuple[float, list[int]]:
        turns = max(1.0, tiling.blocks(shape) * tiling.num_warps / (16 * gpu.multiprocessors))
        past_the_edge = tiling.blocks(shape) * tiling.block_m * tiling.block_c / (shape.rows * shape.out_channels)
        return turns * (taps * (vector + 3 * pixels(tiling)) + 64) * past_the_edge, tiling.numbers

    found = (
        DepthwiseTiling(block_m=block_m, block_c=block_c, num_warps=num_warps)
        for block_m, block_c, num_warps in product((2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128), (1, 2, 4, 8))
    )
    return sorted((tiling for tiling in found if pixels(tiling) in (1, 2, 4)), key=cost)[:_MOST_DEPTHWISE]


def depthwise_image_candidates(shape: Convolution, gpu: GPU, *, itemsize: int) -> list[DepthwiseTiling]:
    """Return tilings for the gradient of a depthwise convolution's images."""
    return depthwise_forward_candidates(image_product(shape), gpu, itemsize=itemsize)


def depthwise_weight_candidates(shape: Convolution, gpu: GPU) -> list[DepthwiseSum]:
    """Return tilings for the gradient of depthwise weights, first those with about two blocks per multiprocessor."""

    def cost(tiling: DepthwiseSum) -> tuple[float, list[int]]:
        steps = ceil_div(shape.rows, tiling.block_m * tiling.split_k)
        turns = max(1.0, tiling.blocks(shape) / (2 * gpu.multiprocessors))
        past_the_edge = tiling.blocks(shape) * tiling.block_c / (shape.out_channels * tiling.split_k)
        own = steps * (tiling.sums(shape) + 16) + 4 * tiling.split_k + 64
        return turns * own * past_the_edge, tiling.numbers

    return sorted(_depthwise(shape), key=cost)[:_MOST_DEPTHWISE]


def _depthwise(shape: Convolution) -> Iterator[DepthwiseSum]:
    for block_c, block_m, num_warps, split_k in product((16, 32, 64), (2, 4, 8, 16), (2, 4, 8), _SPLITS):
        tiling = DepthwiseSum(block_m=block_m, block_c=block_c, split_k=split_k, num_warps=num_warps)
        is_wide = block_c >= 2 * max(16, shape.out_channels)
        is_idle = split_k > 1 and split_k * block_m > shape.rows
        if _FEWEST_SUMS <= tiling.sums(shape) <= _MOST_SUMS and not is_wide and not is_idle:
            yield tiling
