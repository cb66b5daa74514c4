"""How norms are divided into blocks, and the candidates for a GPU."""

from dataclasses import dataclass

from nimblec.kernels.gpu import GPU
from nimblec.kernels.shapes import ceil_div, next_power_of_2
from nimblec.kernels.tilings import NumberedTiling

WIDEST = 8192
"""Columns that a block can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """``rows`` rows of ``columns`` numbers, each normalised by mean and variance, or with ``rms`` by mean square."""

    rows: int
    columns: int
    rms: bool = False

    @property
    def width(self) -> int:
        """The width of a block: a power of two."""
        return max(32, next_power_of_2(self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTiling(NumberedTiling):
    """A block computes ``block_r`` rows."""

    block_r: int
    num_warps: int


def norm_candidates(shape: Norm, gpu: GPU, *, limit: int = 4) -> list[NormTiling]:
    """Return at most ``limit`` tilings, the best first by numbers per thread and warps per multiprocessor.

    Blocks have several rows only where each multiprocessor has a block.
    """
    found = []
    for block_r in (1, 2, 4, 8):
        for num_warps in (1, 2, 4, 8):
            # Numbers that one thread holds.
            numbers = block_r * shape.width / (32 * num_warps)
            is_busy = numbers >= 2 and ceil_div(shape.rows, block_r) >= gpu.multiprocessors
            if (numbers <= 64 or (block_r, num_warps) == (1, 8)) and (block_r == 1 or is_busy):
                found.append(NormTiling(block_r=block_r, num_warps=num_warps))

    def cost(tiling: NormTiling) -> tuple[float, list[int]]:
        warps = ceil_div(shape.rows, tiling.block_r) * tiling.num_warps / gpu.multiprocessors
        numbers = tiling.block_r * shape.width / (32 * tiling.num_warps)
        return 8 + numbers + 2 * (tiling.num_warps > 1) + warps * numbers / 16, tiling.numbers

    return sorted(found, key=cost)[:limit]
