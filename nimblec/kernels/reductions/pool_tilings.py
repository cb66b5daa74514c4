"""How poolings are divided into blocks, and the candidates for a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

from nimblec.kernels.gpu import GPU
from nimblec.kernels.reductions.pool_shapes import Means, Pooling
from nimblec.kernels.shapes import ceil_div, next_power_of_2
from nimblec.kernels.tilings import PixelTiling, by_load

_SECTOR_NBYTES = 32
"""Bytes of the smallest read from the L2 cache."""
_MOST = 6
"""Candidates of a pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTiling(PixelTiling):
    """The division of a pooling; for means a block reads ``block_m`` pixels at a time."""


def pool_candidates(shape: Pooling, gpu: GPU) -> list[PoolTiling]:
    """Return at most six tilings, first those with about two blocks per multiprocessor and little edge waste."""
    widest = next_power_of_2(shape.channels)
    widths = [width for width in (8, 16, 32, 64, 128) if width <= widest] or [widest]
    found = (tiling for width in widths for tiling in _tall(width))
    return by_load(found, shape.rows, shape.channels, gpu)[:_MOST]


def _tall(block_c: int) -> Iterator[PoolTiling]:
    """Yield tilings of two to eight numbers per thread, or one to four for a single channel."""
    least, most = (2, 8) if block_c > 1 else (1, 4)
    for block_m in (4, 8, 16, 32, 64, 128, 256, 512):
        for num_warps in (1, 2, 4, 8):
            if least <= block_m * block_c / (32 * num_warps) <= most:
                yield PoolTiling(block_m=block_m, block_c=block_c, num_warps=num_warps)


def mean_candidates(shape: Means, gpu: GPU, *, itemsize: int = 2) -> list[PoolTiling]:
    """Return at most six tilings, by a rough model of the time; an element has ``itemsize`` bytes."""

    def cost(tiling: PoolTiling) -> tuple[float, list[int]]:
        blocks = shape.images * ceil_div(shape.channels, tiling.block_c)
        steps = ceil_div(shape.pixels, tiling.block_m)
        across = tiling.block_c if shape.channel_stride == 1 else tiling.block_m
        read = steps * tiling.block_m * tiling.block_c / across * max(across * itemsize, _SECTOR_NBYTES)
        # Numbers that one thread holds.
        numbers = tiling.block_m * tiling.block_c / (32 * tiling.num_warps)
        alone = ceil_div(blocks, gpu.multiprocessors) * read / gpu.speed.block_bytes
        time = max(alone, blocks * read / gpu.speed.l2_bytes) + steps * (0.1 + 0.01 * numbers)
        return time + 0.1 * tiling.num_warps**0.5, tiling.numbers

    return sorted(_of_means(shape), key=cost)[:_MOST]


def _of_means(shape: Means) -> Iterator[PoolTiling]:
    """Yield tilings of 4 to 64 numbers per thread, less than twice as long and wide as the images, and a small one."""
    for block_m in (16, 32, 64, 128, 256, 512, 1024, 2048):
        for block_c in (1, 2, 4, 8, 16, 32, 64, 128):
            is_beyond = block_m >= 2 * max(shape.pixels, 16) or block_c >= 2 * shape.channels
            for num_warps in (1, 2, 4, 8):
                if not is_beyond and 4 <= block_m * block_c / (32 * num_warps) <= 64:
                    yield PoolTiling(block_m=block_m, block_c=block_c, num_warps=num_warps)
    yield PoolTiling(block_m=16, block_c=1, num_warps=1)
