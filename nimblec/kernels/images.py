"""The memory layout of images and matrices that the kernels read and write, and the shapes that follow from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nimblec.graph.views import with_strides
from nimblec.kernels.shapes import Convolution, pair, product

ALIGNMENT_NBYTES = 16
"""Bytes that a thread reads or writes at once."""


def convolution_shape(
    x: Tensor,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    groups: int = 1,
) -> Convolution:
    """Return the geometry for images ``x`` (batch, channels, height, width) that lie channels last."""
    batch, channels, height, width = x.shape
    return Convolution(
        batch=batch,
        height=height,
        width=width,
        channels=channels // groups,
        out_channels=out_channels,
        kernel=pair(kernel),
        stride=pair(stride),
        padding=pair(padding),
        dilation=pair(dilation),
        groups=groups,
        pixel_stride=pixel_stride(x),
    )


def product_shape(x: Tensor, out_channels: int) -> Convolution:
    """Return the geometry of a matrix ``x`` (rows, depth) with contiguous rows, at any distance from one another."""
    rows, depth = x.shape
    return product(rows, depth, out_channels, row_stride=x.stride(0) if rows > 1 else depth)


def pixel_stride(x: Tensor) -> int:
    """Return the elements from pixel to pixel of images that lie channels last; others raise ValueError."""
    batch, channels, height, width = x.shape
    stride = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0) if batch > 1 else channels
    wanted = (height * width * stride, 1, width * stride, stride)
    if any(size > 1 and has != want for size, has, want in zip(x.shape, x.stride(), wanted, strict=True)):
        raise ValueError(f"images of shape {tuple(x.shape)} and strides {x.stride()} do not lie channels last")
    return stride


def is_read_well(x: Tensor) -> bool:
    """Return whether the kernels read images at full speed: channels last, or a slice of the channels of such."""
    if x.dim() != 4:
        return False
    if x.is_contiguous(memory_format=torch.channels_last):
        return True
    try:
        distances = pixel_stride(x), x.storage_offset()
    except ValueError:
        return False
    return all(distance * x.dtype.itemsize % ALIGNMENT_NBYTES == 0 for distance in distances)


def is_within_reach(*tensors: Tensor) -> bool:
    """Return whether the offsets of all elements fit into 32 bits, with which the kernels compute them."""
    return all(
        sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1 < 1 << 31
        for x in tensors
    )


def channels_last(x: Tensor) -> Tensor:
    """Return images channels last, as the kernels read them.

    A copy only where their strides differ from the inferred ones: torch's calls and their inference sometimes
    differ for images with an axis of length 1, and so for what is computed from these.
    """
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(memory_format=torch.channels_last)


def laid_like(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    """Return the same numbers with the strides of ``other``; a copy only as in `channels_last`."""
    return None if tensor is None else with_strides(tensor, other.stride())


def new_images(x: Tensor, shape: Convolution) -> Tensor:
    """Allocate the results, channels last."""
    size = (shape.batch, shape.out_channels, shape.out_height, shape.out_width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
