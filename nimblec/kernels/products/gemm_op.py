"""Convolutions and products as torch ops: `nimblec.kernels.launch` says what an op is.

``linear_and_moments`` also returns the moments of its result (`gemm_reference.moments_of`), in parts as wide as its
tiles; with moments, a product normalises the rows of ``x`` (`RowNorm`). With ``factors``
(`nimblec.kernels.products.fp8`), it multiplies e4m3, whose bytes the weights are, and ``x`` may be; with ``out_factor``
the result is, or a copy of it, which ``linear_moments_and_fp8`` also returns. `convolution_into` writes to ``out``,
part of the channels of larger images. The kernel leaves ``counters`` zero; concurrent calls need counters of their own.
``trigger`` is a `nimblec.kernels.gpu.Trigger`; scale, shift, gate and ``before`` are a
`nimblec.kernels.reference.Prologue`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.images import (
    channels_last,
    convolution_shape,
    laid_like,
    new_images,
    pixel_stride,
    product_shape,
)
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.fp8 import FP8, as_fp8, to_bytes
from nimblec.kernels.products.gemm_reference import RowNorm, as_multiplied, moments_of
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import unpack_rows
from nimblec.kernels.reference import NO_PROLOGUE, Prologue, finish
from nimblec.kernels.shapes import Convolution

Arithmetic = Literal["tf32", "tf32x3"]
"""How tensor cores multiply float32: without its last 13 bits, or with all bits in three products."""


_NO_NORM = {"NORM": "none", "EPS": 0.0, "PARTS": 1}


def convolution_launch(
    shape: Convolution,
    tiling: Tiling,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    counters: Tensor | None,
    activation: str,
    trigger: str,
    arithmetic: str,
    prologue: Prologue = NO_PROLOGUE,
    norm: RowNorm | None = None,
    factors: Tensor | None = None,
    out_factor: Tensor | None = None,
    copy: Tensor | None = None,
    out_moments: Tensor | None = None,
    gated: bool = False,
) -> Launch:
    """Return the launch that writes the convolution of ``x`` to ``out``, in rows of ``shape.out_stride`` elements.

    In a product ``norm`` normalises the rows of ``x``, and ``out_moments`` receives the moments of ``out``, whose
    columns must be a multiple of ``block_n``. A ``gated`` product multiplies the activation of each column by the
    column after it.
    """
    down, across = tiling.tiles(shape)
    partials = None
    if tiling.split_k > 1:
        sums = down * across * tiling.split_k, tiling.block_m * tiling.block_n
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    return Launch(
        template="nimblec.kernels.products.gemm_template:convolution",
        blocks=tiling.blocks(shape),
        pointers={
            "x_ptr": x,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "residual_ptr": residual,
            **prologue.pointers,
            "moments_ptr": None if norm is None else norm.moments,
            "sums_ptr": None if norm is None else norm.column_sums,
            "factors_ptr": factors,
            "out_factor_ptr": out_factor,
            "out_ptr": out,
            "copy_ptr": copy,
            "out_moments_ptr": out_moments,
            "partials_ptr": partials,
            "counters_ptr": counters if tiling.split_k > 1 else None,
        },
        settings={
            **shape.settings,
            "GROUPS": shape.groups,
            "RESIDUAL_STRIDE": shape.residual_stride or shape.out_channels,
            "OUT_STRIDE": shape.out_stride or shape.out_channels // (2 if gated else 1),
            "GATED": gated,
            "BEFORE": prologue.activation,
            **(_NO_NORM if norm is None else norm.settings),
            "ACTIVATION": activation,
            "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n,
            "BLOCK_K": tiling.block_k,
            "SPLIT_K": tiling.split_k,
            "STAGES": tiling.num_stages,
            "PRECISION": arithmetic,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        },
        trigger=trigger,
    )


def _convolution(
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
    arithmetic: str = "tf32",
    out: Tensor | None = None,
    before: str = "none",
    groups: int = 1,
    **factors: Tensor | None,
) -> Prepared[Tensor]:
    x, residual = channels_last(x), None if residual is None else channels_last(residual)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation, groups=groups)
    if out is None:
        out = new_images(x, shape)
    residual_stride = None if residual is None else pixel_stride(residual)
    launch = convolution_launch(
        replace(shape, out_stride=pixel_stride(out), residual_stride=residual_stride),
        Tiling.of(tiling),
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        prologue=Prologue(activation=before, **factors),
        out=out,
        counters=counters,
        activation=activation,
        trigger=trigger,
        arithmetic=arithmetic,
    )
    return Prepared(out, launch)


def _convolution_on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    _counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    *_how: object,
    arithmetic: str = "tf32",
    out: Tensor | None = None,
    before: str = "none",
    groups: int = 1,
    **factors: Tensor | None,
) -> Tensor:
    x = channels_last(x)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation, groups=groups)
    rows = unpack_rows(weight, out_channels, shape.depth)
    filters = rows.reshape(out_channels, *shape.kernel, shape.channels).permute(0, 3, 1, 2)
    read = Prologue(activation=before, **factors)(x.float())
    multiplied = as_multiplied(read, x.dtype, arithmetic), as_multiplied(filters, x.dtype, arithmetic)
    vector = None if bias is None else bias.float()
    total = functional.conv2d(*multiplied, vector, shape.stride, shape.padding, shape.dilation, groups)
    return (new_images(x, shape) if out is None else out).copy_(finish(total, residual, activation))


def _linear_moments_and_fp8(
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
    has_moments: bool = True,
    has_copy: bool = True,
    arithmetic: str = "tf32",
    gate: Tensor | None = None,
    before: str = "none",
    gated: bool = False,
    factors: Tensor | None = None,
    out_factor: Tensor | None = None,
    **norm: Any,
) -> Prepared[tuple[Tensor, Tensor | None, Tensor | None]]:
    x = x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
    is_rounded = out_factor is not None and not has_copy
    dtype = torch.uint8 if is_rounded else x.dtype if factors is None else torch.float16
    out = x.new_empty((x.shape[0], out_channels // 2 if gated else out_channels), dtype=dtype)
    moments = _new_moments(out, Tiling.of(tiling)) if has_moments else None
    copy = torch.empty_like(out, dtype=torch.uint8) if has_copy else None
    launch = convolution_launch(
        product_shape(x, out_channels),
        Tiling.of(tiling),
        x=x,
        weight=weight,
        bias=bias,
        residual=laid_like(residual, out),
        out=out,
        counters=counters,
        activation=activation,
        trigger=trigger,
        arithmetic=arithmetic,
        prologue=Prologue(gate=gate, activation=before),
        norm=_row_norm(**norm),
        factors=factors,
        out_factor=out_factor,
        copy=copy,
        out_moments=moments,
        gated=gated,
    )
    return Prepared((out, moments, copy), launch)


def _linear_and_moments(x: Tensor, *given: Any, **how: Any) -> Prepared[tuple[Tensor, Tensor | None]]:
    prepared = _linear_moments_and_fp8(x, *given, **how, has_copy=False)
    return Prepared(prepared.results[:2], prepared.launch)


def _linear(x: Tensor, *given: Any, **how: Any) -> Prepared[Tensor]:
    prepared = _linear_moments_and_fp8(x, *given, **how, has_moments=False, has_copy=False)
    return Prepared(prepared.results[0], prepared.launch)


def _new_moments(out: Tensor, tiling: Tiling) -> Tensor:
    """Allocate the moments of ``out`` (rows, columns), in parts as wide as a tile, which must divide a row evenly."""
    rows, columns = out.shape
    assert columns % tiling.block_n == 0, f"{columns} columns are no multiple of {tiling.block_n}"
    return out.new_empty((columns // tiling.block_n, 2, rows), dtype=torch.float32)


def _row_norm(
    moments: Tensor | None = None, column_sums: Tensor | None = None, eps: float = 0.0, rms: bool = False
) -> RowNorm | None:
    """Return the norm of the rows that a product reads, from the arguments of the op; None without one."""
    if moments is None or column_sums is None:
        return None
    return RowNorm(moments=moments, column_sums=column_sums, eps=eps, rms=rms)


def _linear_on_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    _counters: Tensor | None,
    out_channels: int,
    activation: str,
    *_how: object,
    arithmetic: str = "tf32",
    gate: Tensor | None = None,
    before: str = "none",
    gated: bool = False,
    factors: Tensor | None = None,
    out_factor: Tensor | None = None,
    **norm: Any,
) -> Tensor:
    filters = unpack_rows(weight, out_channels, x.shape[1])
    read = x if gate is None else Prologue(gate=gate, activation=before)(x.float())
    if factors is None:
        total = functional.linear(*(as_multiplied(t, x.dtype, arithmetic) for t in (read, filters)))
    else:
        rounded = x.view(FP8) if x.dtype is torch.uint8 else as_fp8(read.float() * factors[0])
        total = functional.linear(rounded.float(), filters.view(FP8).float()) * factors[1:]
    corrected = _row_norm(**norm)
    if corrected is not None:
        total = corrected(total, x.shape[1])
    if bias is not None:
        total += bias.float()
    if gated:
        first, second = total.to(x.dtype).float().unflatten(1, (-1, 2)).unbind(2)
        total = finish(first, None, activation) * second
    else:
        total = finish(total, residual, activation)
    if out_factor is not None:
        return to_bytes(total, out_factor)
    return total.to(x.dtype if factors is None else torch.float16)


def _linear_and_moments_on_cpu(x: Tensor, *given: Any, **how: Any) -> tuple[Tensor, Tensor]:
    out = _linear_on_cpu(x, *given, **how)
    *_, tiling, _trigger = given
    return out, moments_of(out, Tiling.of(tiling).block_n)


def _linear_moments_and_fp8_on_cpu(
    x: Tensor, *given: Any, out_factor: Tensor, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *_linear_and_moments_on_cpu(x, *given, **how), _linear_on_cpu(x, *given, out_factor=out_factor, **how)


_CONVOLUTION = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor(a!)? counters, int out_channels, "
    "int[] kernel, int[] stride, int[] padding, int[] dilation, str activation, int[] tiling, str trigger, *, "
    "Tensor? scale=None, Tensor? shift=None, Tensor? gate=None, str before='none', str arithmetic='tf32', "
    "int groups=1"
)
_LINEAR = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor(a!)? counters, int out_channels, "
    "str activation, int[] tiling, str trigger, *, Tensor? gate=None, str before='none', str arithmetic='tf32', "
    "Tensor? moments=None, Tensor? column_sums=None, float eps=0., bool rms=False, bool gated=False, "
    "Tensor? factors=None, Tensor? out_factor=None"
)
convolution = define_op(f"convolution({_CONVOLUTION}) -> Tensor", prepare=_convolution, reference=_convolution_on_cpu)
convolution_into = define_op(
    f"convolution_into({_CONVOLUTION}, Tensor(b!) out) -> Tensor(b!)",
    prepare=_convolution,
    reference=_convolution_on_cpu,
)
linear = define_op(f"linear({_LINEAR}) -> Tensor", prepare=_linear, reference=_linear_on_cpu)
linear_and_moments = define_op(
    f"linear_and_moments({_LINEAR}) -> (Tensor, Tensor)",
    prepare=_linear_and_moments,
    reference=_linear_and_moments_on_cpu,
)
linear_moments_and_fp8 = define_op(
    f"linear_moments_and_fp8({_LINEAR}) -> (Tensor, Tensor, Tensor)",
    prepare=_linear_moments_and_fp8,
    reference=_linear_moments_and_fp8_on_cpu,
)
