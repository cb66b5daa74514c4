"""Convolutions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.onnx_ops.axes import repeated
from nimblec.onnx_ops.linear import centered
from nimblec.onnx_ops.table import Ints, Refused, op


def padding_of(
    auto_pad: str, pads: Ints | None, lengths: Sequence[int], kernel: Sequence[int], strides: Ints, dilations: Ints
) -> tuple[Ints, Ints]:
    """Return the padding before and after each spatial axis, by ``pads`` or by ``auto_pad``."""
    rank = len(lengths)
    if auto_pad in ("NOTSET", ""):
        both = repeated(pads, 2 * rank, 0, "pads")
        return both[:rank], both[rank:]
    if auto_pad == "VALID":
        return (0,) * rank, (0,) * rank
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        raise Refused(f"attribute 'auto_pad' is {auto_pad!r}; expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
    totals = [
        max(0, (-(-length // stride) - 1) * stride + (k - 1) * dilation + 1 - length)
        for length, k, stride, dilation in zip(lengths, kernel, strides, dilations, strict=True)
    ]
    small = tuple(total // 2 for total in totals)
    large = tuple(total - total // 2 for total in totals)
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def pad_spatial(x: Tensor, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad the last ``len(before)`` axes."""
    if not any((*before, *after)):
        return x
    pairs = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
    return functional.pad(x, pairs, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The attributes that all convolutions have."""

    auto_pad: str = "NOTSET"
    dilations: Ints | None = None
    group: int = 1
    kernel_shape: Ints | None = None
    pads: Ints | None = None
    strides: Ints | None = None

    def along(self, x: Tensor, w: Tensor) -> tuple[Ints, Ints, Ints]:
        """Return kernel, strides and dilations along each spatial axis; raise `Refused` where they do not fit."""
        kernel, rank = tuple(w.shape[2:]), x.dim() - 2
        if not 1 <= rank <= 3 or len(kernel) != rank:
            raise Refused(f"input of {x.dim()} and weights of {w.dim()} dimensions; expected 3 to 5 of both")
        if self.kernel_shape not in (None, kernel):
            raise Refused(f"attribute 'kernel_shape' is {self.kernel_shape}; the weights have {kernel}")
        return kernel, repeated(self.strides, rank, 1, "strides"), repeated(self.dilations, rank, 1, "dilations")


@op("Conv")
def convolution(x: Tensor, w: Tensor, b: Tensor | None = None, *, geometry: Geometry) -> Tensor:
    kernel, strides, dilations = geometry.along(x, w)
    zeros = (0,) * len(kernel)
    before, after = padding_of(geometry.auto_pad, geometry.pads, x.shape[2:], kernel, strides, dilations)
    if before != after or min(before, default=0) < 0:
        x, before = pad_spatial(x, before, after), zeros
    return torch.ops.aten.convolution(x, w, b, strides, before, dilations, False, zeros, geometry.group)


@op("ConvTranspose")
def transposed_convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    geometry: Geometry,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
) -> Tensor:
    kernel, strides, dilations = geometry.along(x, w)
    rank, auto_pad, group = len(kernel), geometry.auto_pad, geometry.group
    extra = repeated(output_padding, rank, 0, "output_padding")
    full = [
        (length - 1) * stride + (k - 1) * dilation + 1
        for length, stride, k, dilation in zip(x.shape[2:], strides, kernel, dilations, strict=True)
    ]
    if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = output_shape or [length * s for length, s in zip(x.shape[2:], strides, strict=True)]
        before, after = _crop_to(full, wanted[-rank:], extra, auto_pad)
    else:
        before, after = padding_of(auto_pad, geometry.pads, x.shape[2:], kernel, strides, dilations)
    symmetric = before == after and min(before, default=0) >= 0
    if symmetric and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        return torch.ops.aten.convolution(x, w, b, strides, before, dilations, True, extra, group)
    y = torch.ops.aten.convolution(x, w, None, strides, [0] * rank, dilations, True, [0] * rank, group)
    y = pad_spatial(y, [-n for n in before], [e - n for e, n in zip(extra, after, strict=True)])
    return y if b is None else y + b.reshape([-1] + [1] * rank)


def _crop_to(full: Sequence[int], wanted: Sequence[int], extra: Ints, auto_pad: str) -> tuple[Ints, Ints]:
    """Return what to cut off before and after, so that ``wanted`` is left."""
    if len(wanted) != len(full):
        raise Refused(f"attribute 'output_shape' is {tuple(wanted)}; expected {len(full)} values")
    totals = [f + e - n for f, n, e in zip(full, wanted, extra, strict=True)]
    small = tuple(total // 2 for total in totals)
    large = tuple(total - total // 2 for total in totals)
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


@op("ConvInteger", since=10)
def convolution_integer(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    *,
    geometry: Geometry,
) -> Tensor:
    if w_zero_point is not None and w_zero_point.numel() > 1:
        w_zero_point = w_zero_point.reshape([-1] + [1] * (w.dim() - 1))
    y = convolution(centered(x, x_zero_point, 0), centered(w, w_zero_point, 0), geometry=geometry)
    return y.to(torch.int32)


@op("Col2Im", since=18)
def col_to_image(
    x: Tensor,
    image_shape: Ints,
    block_shape: Ints,
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """Sum columns into an image: a transposed convolution with one-hot kernels."""
    rank = len(image_shape)
    block = torch.Size(block_shape).numel()
    if len(block_shape) != rank or x.dim() != 3 or x.shape[1] % block:
        raise Refused(f"image {image_shape} and block {block_shape} do not fit {tuple(x.shape)}")
    strides = repeated(strides, rank, 1, "strides")
    dilations = repeated(dilations, rank, 1, "dilations")
    both = repeated(pads, 2 * rank, 0, "pads")
    places = [
        (n + p + q - d * (k - 1) - 1) // s + 1
        for n, p, q, d, k, s in zip(image_shape, both, both[rank:], dilations, block_shape, strides, strict=False)
    ]
    channels = x.shape[1] // block
    one_hot = torch.eye(block, dtype=x.dtype).reshape([block, 1, *block_shape])
    columns = x.reshape([x.shape[0] * channels, block, *places])
    image = torch.ops.aten.convolution(
        columns, one_hot, None, strides, [0] * rank, dilations, True, [0] * rank, 1
    )
    ends = [n + p - full for n, p, full in zip(image_shape, both, image.shape[2:], strict=False)]
    image = pad_spatial(image, [-p for p in both[:rank]], ends)
    return image.reshape([x.shape[0], channels, *image_shape])
