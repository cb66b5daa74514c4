"""The kernels as torch ops in the namespace ``nimblec``: calls that a graph holds and dispatch modes see.

``linear_and_moments`` also returns the `nimblec.kernels.reference.moments_of` its result, of parts as wide
as its tiles; a product that is given moments is of the normalised rows of ``x`` (`RowNorm`).

Results are new memory, but for `convolution_into`, which writes its result to ``out``, part of the
channels of larger images. ``counters`` is written by the kernel and is zero again when it ends; calls
that may run side by side need counters of their own. ``trigger`` is a `nimblec.kernels.launching.Trigger`;
scale, shift, gate and ``before``, an activation, are a `nimblec.kernels.reference.Prologue`; ``arithmetic``
is a `nimblec.kernels.launching.Arithmetic`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from nimblec.kernels.launching import launch_convolution
from nimblec.kernels.packing import unpack_rows
from nimblec.kernels.reference import NO_PROLOGUE, Prologue, RowNorm, as_multiplied, finish, moments_of
from nimblec.kernels.shapes import Convolution, Pair, Tiling, product

ALIGNMENT_NBYTES = 16
"""What a thread reads or writes at once."""

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The ops live as long as this module."""

_CONVOLUTION = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor(a!)? counters, int out_channels, "
    "int[] kernel, int[] stride, int[] padding, int[] dilation, str activation, int[] tiling, str trigger, *, "
    "Tensor? scale=None, Tensor? shift=None, Tensor? gate=None, str before='none', str arithmetic='tf32'"
)
_LIBRARY.define(f"convolution({_CONVOLUTION}) -> Tensor")
_LIBRARY.define(f"convolution_into({_CONVOLUTION}, Tensor(b!) out) -> Tensor(b!)")
_LINEAR = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor(a!)? counters, int out_channels, "
    "str activation, int[] tiling, str trigger, *, str arithmetic='tf32', "
    "Tensor? moments=None, Tensor? column_sums=None, float eps=0., bool rms=False"
)
_LIBRARY.define(f"linear({_LINEAR}) -> Tensor")
_LIBRARY.define(f"linear_and_moments({_LINEAR}) -> (Tensor, Tensor)")


def convolution_shape(
    x: Tensor,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Convolution:
    """The geometry for images ``x`` (batch, channels, height, width) that lie channels last."""
    batch, channels, height, width = x.shape
    return Convolution(
        batch=batch,
        height=height,
        width=width,
        channels=channels,
        out_channels=out_channels,
        kernel=_pair(kernel),
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        pixel_stride=pixel_stride(x),
    )


def product_shape(x: Tensor, out_channels: int) -> Convolution:
    """The geometry for a matrix ``x`` (rows, depth) whose rows lie without gaps, at any distance."""
    rows, depth = x.shape
    return product(rows, depth, out_channels, row_stride=x.stride(0) if rows > 1 else depth)


def _pair(numbers: Sequence[int]) -> Pair:
    first, second = numbers
    return first, second


def pixel_stride(x: Tensor) -> int:
    """How far apart neighbouring pixels lie in images that lie channels last; others are a ValueError."""
    batch, channels, height, width = x.shape
    stride = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0) if batch > 1 else channels
    wanted = (height * width * stride, 1, width * stride, stride)
    if any(size > 1 and has != want for size, has, want in zip(x.shape, x.stride(), wanted, strict=True)):
        raise ValueError(f"images of shape {tuple(x.shape)} and strides {x.stride()} do not lie channels last")
    return stride


def is_read_well(x: Tensor) -> bool:
    """Whether the kernels read images as fast as dense ones: channels last, also a part of the channels of others."""
    if x.dim() != 4:
        return False
    if x.is_contiguous(memory_format=torch.channels_last):
        return True
    try:
        distances = pixel_stride(x), x.storage_offset()
    except ValueError:
        return False
    return all(distance * x.dtype.itemsize % ALIGNMENT_NBYTES == 0 for distance in distances)


def channels_last(x: Tensor) -> Tensor:
    """Images as the kernels read them.

    A copy only where they lie otherwise than was inferred: torch's calls and their inference differ at
    times on images that have an axis of length 1, and so on what comes after them.
    """
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous(memory_format=torch.channels_last)


def laid_like(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    """The same numbers, each where ``other`` has its own; a copy only as in `channels_last`."""
    if tensor is None:
        return None
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    if all(size == 1 or mine == theirs for size, mine, theirs in pairs):
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=other.dtype, device=tensor.device).copy_(tensor)


def new_images(x: Tensor, shape: Convolution) -> Tensor:
    """Memory for the results, channels last."""
    size = (shape.batch, shape.out_channels, shape.out_height, shape.out_width)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _convolution_fake(
    x: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    _counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_how: object,
    out: Tensor | None = None,
    **_prologue: object,
) -> Tensor:
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    return new_images(x, shape) if out is None else out


def _convolution_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    tiling: Sequence[int],
    trigger: str,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    before: str = "none",
    arithmetic: str = "tf32",
    out: Tensor | None = None,
) -> Tensor:
    x = channels_last(x)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    if out is None:
        out = new_images(x, shape)
    launch_convolution(
        replace(shape, out_stride=pixel_stride(out)),
        Tiling.of(tiling),
        x=x,
        weight=weight,
        bias=bias,
        residual=laid_like(residual, torch.empty_like(out, device="meta", memory_format=torch.channels_last)),
        prologue=Prologue(scale=scale, shift=shift, gate=gate, activation=before),
        out=out,
        counters=counters,
        activation=activation,
        trigger=trigger,
        arithmetic=arithmetic,
    )
    return out


def _convolution_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counters: Tensor | None,  # noqa: ARG001
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    tiling: Sequence[int],  # noqa: ARG001
    trigger: str,  # noqa: ARG001
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    before: str = "none",
    arithmetic: str = "tf32",
    out: Tensor | None = None,
) -> Tensor:
    x = channels_last(x)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    rows = unpack_rows(weight, out_channels, shape.depth)
    filters = rows.reshape(out_channels, *shape.kernel, shape.channels).permute(0, 3, 1, 2)
    read = Prologue(scale=scale, shift=shift, gate=gate, activation=before)(x.float())
    factors = as_multiplied(read, x.dtype, arithmetic), as_multiplied(filters, x.dtype, arithmetic)
    total = functional.conv2d(*factors, _float(bias), shape.stride, shape.padding, shape.dilation)
    return (new_images(x, shape) if out is None else out).copy_(finish(total, residual, activation))


def _linear_fake(
    x: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    _counters: Tensor | None,
    out_channels: int,
    *_how: object,
    **_norm: object,
) -> Tensor:
    return x.new_empty((x.shape[0], out_channels))


def _linear_and_moments_fake(x: Tensor, *given: Any, **how: Any) -> tuple[Tensor, Tensor]:
    out = _linear_fake(x, *given, **how)
    return out, _new_moments(out, _tiling(given))


def _tiling(given: Sequence[Any]) -> Tiling:
    """That among the arguments of a product, before its trigger."""
    *_, tiling, _trigger = given
    return Tiling.of(tiling)


def _new_moments(out: Tensor, tiling: Tiling) -> Tensor:
    """Memory for those of ``out`` (rows, columns), of parts as wide as tiles, of which each row has a whole number."""
    rows, columns = out.shape
    assert columns % tiling.block_n == 0, f"{columns} columns are no multiple of {tiling.block_n}"
    return out.new_empty((columns // tiling.block_n, 2, rows), dtype=torch.float32)


def _linear_cuda(x: Tensor, *given: Any, **how: Any) -> Tensor:
    return _launch_linear(x, *given, **how, has_moments=False)[0]


def _linear_and_moments_cuda(x: Tensor, *given: Any, **how: Any) -> tuple[Tensor, Tensor]:
    out, moments = _launch_linear(x, *given, **how, has_moments=True)
    assert moments is not None
    return out, moments


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counters: Tensor | None,
    out_channels: int,
    activation: str,
    tiling: Sequence[int],
    trigger: str,
    *,
    has_moments: bool,
    arithmetic: str = "tf32",
    **norm: Any,
) -> tuple[Tensor, Tensor | None]:
    x = x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
    out = x.new_empty((x.shape[0], out_channels))
    moments = _new_moments(out, Tiling.of(tiling)) if has_moments else None
    launch_convolution(
        product_shape(x, out_channels),
        Tiling.of(tiling),
        x=x,
        weight=weight,
        bias=bias,
        residual=laid_like(residual, out),
        prologue=NO_PROLOGUE,
        out=out,
        counters=counters,
        activation=activation,
        trigger=trigger,
        arithmetic=arithmetic,
        norm=row_norm(**norm),
        out_moments=moments,
    )
    return out, moments


def row_norm(
    moments: Tensor | None = None, column_sums: Tensor | None = None, eps: float = 0.0, rms: bool = False
) -> RowNorm | None:
    """The norm of the rows that a product reads, by the arguments of the op; None where there is none."""
    if moments is None or column_sums is None:
        return None
    return RowNorm(moments=moments, column_sums=column_sums, eps=eps, rms=rms)


def _linear_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counters: Tensor | None,  # noqa: ARG001
    out_channels: int,
    activation: str,
    tiling: Sequence[int],  # noqa: ARG001
    trigger: str,  # noqa: ARG001
    *,
    arithmetic: str = "tf32",
    **norm: Any,
) -> Tensor:
    filters = unpack_rows(weight, out_channels, x.shape[1])
    total = functional.linear(*(as_multiplied(t, x.dtype, arithmetic) for t in (x, filters)))
    corrected = row_norm(**norm)
    if corrected is not None:
        total = corrected(total, x.shape[1])
    if bias is not None:
        total += bias.float()
    return finish(total, residual, activation).to(x.dtype)


def _linear_and_moments_cpu(x: Tensor, *given: Any, **how: Any) -> tuple[Tensor, Tensor]:
    out = _linear_cpu(x, *given, **how)
    return out, moments_of(out, _tiling(given).block_n)


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


for _name, _fake, _cuda, _cpu in (
    ("convolution", _convolution_fake, _convolution_cuda, _convolution_cpu),
    ("convolution_into", _convolution_fake, _convolution_cuda, _convolution_cpu),
    ("linear", _linear_fake, _linear_cuda, _linear_cpu),
    ("linear_and_moments", _linear_and_moments_fake, _linear_and_moments_cuda, _linear_and_moments_cpu),
):
    torch.library.register_fake(f"nimblec::{_name}", _fake, lib=_LIBRARY)
    _LIBRARY.impl(_name, _cuda, "CUDA")
    _LIBRARY.impl(_name, _cpu, "CPU")

convolution: OpOverload = torch.ops.nimblec.convolution.default
convolution_into: OpOverload = torch.ops.nimblec.convolution_into.default
linear: OpOverload = torch.ops.nimblec.linear.default
linear_and_moments: OpOverload = torch.ops.nimblec.linear_and_moments.default
