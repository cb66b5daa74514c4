"""How a depthwise convolution is divided into blocks, and the candidates for a GPU."""

from dataclasses import dataclass

from nimblec.kernels.gpu import GPU
from nimblec.kernels.shapes import Convolution
from nimblec.kernels.tilings import PixelTiling, by_load

_VECTOR = 8
"""Channels that a thread loads at once, 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseTiling(PixelTiling):
    """The division of a depthwise convolution."""

    def blocks(self, shape: Convolution) -> int:
        """Return how many blocks are launched."""
        return self.blocks_over(shape.rows, shape.out_channels)


def depthwise_candidates(shape: Convolution, gpu: GPU, *, limit: int = 5) -> list[DepthwiseTiling]:
    """Return at most ``limit`` tilings, first those with about two blocks per multiprocessor and little edge waste."""
    found = []
    for block_c in (16, 32, 64, 128):
        for block_m in (4, 8, 16, 32, 64):
            threads = block_m * block_c // _VECTOR
            if 32 <= threads <= 512:
                found.append(DepthwiseTiling(block_m=block_m, block_c=block_c, num_warps=min(threads // 32, 8)))
    return by_load(found, shape.rows, shape.out_channels, gpu)[:limit]
