"""What a kernel computes: the geometry of a convolution or a matrix product, and how it is cut into blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of images (batch, height, width, channels), the channels next to each other in memory.

    Neighbouring pixels of the input are ``pixel_stride`` elements apart, those of the result
    ``out_stride`` (None: as many as there are channels); rows and images follow without a gap. As a
    matrix product it has ``rows`` x ``out_channels`` results, each a sum of ``depth`` products.
    """

    batch: int
    height: int
    width: int
    channels: int
    out_channels: int
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    pixel_stride: int | None = None
    out_stride: int | None = None

    @property
    def out_height(self) -> int:
        """Rows of pixels of the result."""
        return self._extent(self.height, 0)

    @property
    def out_width(self) -> int:
        """Pixels of a row of the result."""
        return self._extent(self.width, 1)

    @property
    def rows(self) -> int:
        """Pixels of all results."""
        return self.batch * self.out_height * self.out_width

    @property
    def depth(self) -> int:
        """Products in each sum: kernel height, kernel width, channels."""
        return self.kernel[0] * self.kernel[1] * self.channels

    def _extent(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1


def product(rows: int, depth: int, columns: int, *, row_stride: int | None = None) -> Convolution:
    """The matrix product (rows, depth) x (depth, columns): a 1x1 convolution of one line of pixels."""
    return Convolution(batch=1, height=1, width=rows, channels=depth, out_channels=columns, pixel_stride=row_stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a kernel cuts its work: a block computes ``block_m`` rows by ``block_n`` columns of a part of the sum.

    ``split_k`` blocks share the sum of one tile; each walks its part ``block_k`` products at a time.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3

    @property
    def numbers(self) -> list[int]:
        """What an op takes as its ``tiling``."""
        return [self.block_m, self.block_n, self.block_k, self.split_k, self.num_warps, self.num_stages]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The inverse of `numbers`."""
        block_m, block_n, block_k, split_k, num_warps, num_stages = numbers
        return cls(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            split_k=split_k,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    def tiles(self, shape: Convolution) -> Pair:
        """How many tiles the result has: down, across."""
        return ceil_div(shape.rows, self.block_m), ceil_div(shape.out_channels, self.block_n)

    def steps(self, shape: Convolution) -> int:
        """How many steps of ``block_k`` the whole sum has."""
        return ceil_div(shape.depth, self.block_k)

    def blocks(self, shape: Convolution) -> int:
        """How many blocks are launched."""
        down, across = self.tiles(shape)
        return down * across * self.split_k


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)
