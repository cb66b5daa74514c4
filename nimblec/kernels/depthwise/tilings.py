"""How a depthwise convolution is divided into blocks, and the candidates for a GPU."""

from dataclasses import dataclass

from nimblec.kernels.core.gpu import GPU
from nimblec.kernels.core.shapes import Convolution, ceil_div
from nimblec.kernels.core.tilings import NumberedTiling

_VECTOR = 8
"""Channels that a thread loads at once, 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseTiling(NumberedTiling):
    """A block computes ``block_m`` pixels of ``block_c`` channels."""

    block_m: int
    block_c: int
    num_warps: int = 4

    def blocks(self, shape: Convolution) -> int:
        """How many blocks are launched."""
        return ceil_div(shape.rows, self.block_m) * ceil_div(shape.out_channels, self.block_c)


def depthwise_candidates(shape: Convolution, gpu: GPU, *, limit: int = 5) -> list[DepthwiseTiling]:
    """At most ``limit`` tilings, those of about two blocks per multiprocessor and little work past the edges first."""
    found = []
    for block_c in (16, 32, 64, 128):
        for block_m in (4, 8, 16, 32, 64):
            threads = block_m * block_c // _VECTOR
            if 32 <= threads <= 512:
                found.append(DepthwiseTiling(block_m=block_m, block_c=block_c, num_warps=min(threads // 32, 8)))

    def cost(tiling: DepthwiseTiling) -> tuple[float, list[int]]:
        done = tiling.blocks(shape) * tiling.block_m * tiling.block_c / (shape.rows * shape.out_channels)
        load = tiling.blocks(shape) / (2 * gpu.multiprocessors)
        return done * max(load**0.5, load**-0.5), tiling.numbers

    return sorted(found, key=cost)[:limit]
