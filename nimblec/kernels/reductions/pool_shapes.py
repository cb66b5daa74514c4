"""The geometry of a pooling."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nimblec.kernels.images import pixel_stride
from nimblec.kernels.shapes import Pair, Windows

Kind = Literal["max", "average", "padded average"]
"""The result of a window; a padded average counts padding as pixels of value zero."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling(Windows):
    """Windows of images (images, height, width, channels), whose channels are adjacent in memory.

    Adjacent pixels are ``pixel_stride`` elements apart; rows and images follow without a gap. Contiguous images
    (batch, channels, height, width) are batch * channels images of one channel.
    """

    images: int
    height: int
    width: int
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool
    pixel_stride: int

    @property
    def rows(self) -> int:
        """Pixels of the whole result."""
        return self.images * self.out_height * self.out_width

    @property
    def settings(self) -> dict[str, int]:
        """The template's constants."""
        return {**self._settings, "PIXEL_STRIDE": self.pixel_stride}

    def _extent(self, size: int, axis: int) -> int:
        """Return the number of windows, as torch counts: a last one that begins in the padding at the end is left out.

        aten/src/ATen/native/Pool.h, pooling_output_shape.
        """
        padding, stride = self.padding[axis], self.stride[axis]
        room = size + 2 * padding - self.dilation[axis] * (self.kernel[axis] - 1) - 1
        count = (room + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        return count - 1 if self.ceil_mode and (count - 1) * stride >= size + padding else count


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Means over the pixels of images (images, pixels, channels) with these strides."""

    images: int
    pixels: int
    channels: int
    image_stride: int
    pixel_stride: int
    channel_stride: int


def lies_channels_last(x: Tensor) -> bool:
    """Return whether images lie channels last, possibly as part of the channels of larger images."""
    if x.is_contiguous():
        return x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] > 1
    try:
        pixel_stride(x)
    except ValueError:
        return False
    return True


def means_of(x: Tensor) -> Means:
    """Return the geometry for channels-last or contiguous images; contiguous ones count as channels of one image."""
    batch, channels, height, width = x.shape
    pixels = height * width
    if not lies_channels_last(x):
        assert x.is_contiguous(), f"images of strides {x.stride()} lie neither contiguous nor channels last"
        return Means(
            images=1,
            pixels=pixels,
            channels=batch * channels,
            image_stride=0,
            pixel_stride=1,
            channel_stride=pixels,
        )
    stride = pixel_stride(x)
    return Means(
        images=batch,
        pixels=pixels,
        channels=channels,
        image_stride=pixels * stride,
        pixel_stride=stride,
        channel_stride=1,
    )
