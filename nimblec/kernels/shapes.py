"""The geometry of windows over images, of a convolution or of a matrix product."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]


class Windows(ABC):
    """Windows that slide over images; a pair has one number for each axis of the images."""

    __slots__ = ()

    height: int
    width: int
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def out_height(self) -> int:
        """Rows of pixels of the result."""
        return self._extent(self.height, 0)

    @property
    def out_width(self) -> int:
        """Pixels of a row of the result."""
        return self._extent(self.width, 1)

    @property
    @abstractmethod
    def rows(self) -> int:
        """Pixels of the whole result."""

    @property
    def window_settings(self) -> dict[str, int]:
        """The constants of a template that describe one window."""
        pairs = {"KERNEL": self.kernel, "STRIDE": self.stride, "PADDING": self.padding, "DILATION": self.dilation}
        return {f"{name}_{axis}": size for name, sizes in pairs.items() for axis, size in zip("HW", sizes, strict=True)}

    @property
    def _settings(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "HEIGHT": self.height,
            "WIDTH": self.width,
            "CHANNELS": self.channels,
            "OUT_HEIGHT": self.out_height,
            "OUT_WIDTH": self.out_width,
            **self.window_settings,
        }

    @abstractmethod
    def _extent(self, size: int, axis: int) -> int:
        """Return the number of windows along an axis of ``size`` pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution(Windows):
    """A convolution of images (batch, height, width, channels), whose channels are adjacent in memory.

    Adjacent pixels of the input are ``pixel_stride`` elements apart (0: all are the same), those of the result
    ``out_stride``, of a residual ``residual_stride``; None stands for the number of channels. Rows and images
    follow without a gap. As a matrix product it has ``rows`` x ``out_channels`` results, each a sum of ``depth``
    products. With ``groups`` each sum is over the ``channels`` of one group, and as many times more are read.
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
    groups: int = 1
    pixel_stride: int | None = None
    out_stride: int | None = None
    residual_stride: int | None = None

    @property
    def rows(self) -> int:
        """Pixels of the whole result."""
        return self.batch * self.out_height * self.out_width

    @property
    def depth(self) -> int:
        """Products in each sum: kernel height * kernel width * channels."""
        return self.kernel[0] * self.kernel[1] * self.channels

    @property
    def settings(self) -> dict[str, int]:
        """The constants of templates that read images."""
        return {
            **self._settings,
            "PIXEL_STRIDE": self.channels * self.groups if self.pixel_stride is None else self.pixel_stride,
            "OUT_CHANNELS": self.out_channels,
        }

    def _extent(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1


def product(rows: int, depth: int, columns: int, *, row_stride: int | None = None) -> Convolution:
    """Return the matrix product (rows, depth) x (depth, columns): a 1x1 convolution of one line of pixels."""
    return Convolution(batch=1, height=1, width=rows, channels=depth, out_channels=columns, pixel_stride=row_stride)


def pair(numbers: Sequence[int]) -> Pair:
    """Return two numbers, one for each axis of images."""
    first, second = numbers
    return first, second


def ceil_div(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
