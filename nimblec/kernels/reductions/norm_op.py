"""Layer norm and RMS norm as torch ops, alone or with a residual added before.

`nimblec.kernels.launch` says what an op is. Weight and bias are read before the kernel waits for those
before it, so no kernel may write them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.fp8 import to_bytes
from nimblec.kernels.reductions.norm_tilings import Norm, NormTiling
from nimblec.kernels.shapes import ceil_div


def norm_shape(x: Tensor, *, rms: bool) -> Norm:
    """Return the geometry of a contiguous tensor, normalised over its last axis."""
    assert x.is_contiguous(), f"a tensor of strides {x.stride()} has gaps between its rows"
    return Norm(rows=x.numel() // x.shape[-1], columns=x.shape[-1], rms=rms)


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> Tensor:
    """Return the kernel's result, computed in float32 and rounded once."""
    y = x.float()
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def _add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
    tiling: Sequence[int],
    trigger: str,
    factor: Tensor | None = None,
) -> Prepared[tuple[Tensor, Tensor | None]]:
    """Return the norm, and its argument where that is a sum with a residual, or with a factor its bytes in e4m3."""
    if residual is not None:
        assert residual.is_contiguous(), f"a residual of strides {residual.stride()} has gaps between its rows"
    out, total = x.new_empty(x.shape, dtype=dtype), None if residual is None else x.new_empty(x.shape)
    rounded = None if factor is None else x.new_empty(x.shape, dtype=torch.uint8)
    shape, tile = norm_shape(x, rms=rms), NormTiling.of(tiling)
    launch = Launch(
        template="nimblec.kernels.reductions.norm_template:norm",
        blocks=ceil_div(shape.rows, tile.block_r),
        pointers={
            "x_ptr": x,
            "residual_ptr": residual,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "sum_ptr": total,
            "rounded_ptr": rounded,
            "factor_ptr": factor,
            "out_ptr": out,
        },
        settings={
            "ROWS": shape.rows,
            "COLUMNS": shape.columns,
            "EPS": eps,
            "RMS": shape.rms,
            "BLOCK_R": tile.block_r,
            "BLOCK_C": shape.width,
            "num_warps": tile.num_warps,
        },
        trigger=trigger,
    )
    return Prepared((out, total if rounded is None else rounded), launch)


def _layer_norm(x: Tensor, *settings: Any) -> Prepared[Tensor]:
    prepared = _add_layer_norm(x, None, *settings)
    return Prepared(prepared.results[0], prepared.launch)


def _layer_norm_and_fp8(x: Tensor, *settings: Any) -> Prepared[tuple[Tensor, Tensor | None]]:
    return _add_layer_norm(x, None, *settings)


def _layer_norm_and_fp8_on_cpu(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    weight, bias, eps, rms, dtype, _tiling, _trigger, factor = settings
    normal = normalized(x, weight, bias, eps, rms, torch.float32)
    return normal.to(dtype), to_bytes(normal, factor)


def _layer_norm_on_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
    *_how: object,
) -> Tensor:
    return normalized(x, weight, bias, eps, rms, dtype)


def _add_layer_norm_on_cpu(x: Tensor, residual: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _layer_norm_on_cpu(total, *settings), total


_SETTINGS = "Tensor? weight, Tensor? bias, float eps, bool rms, ScalarType dtype, int[] tiling, str trigger"
layer_norm = define_op(
    f"layer_norm(Tensor x, {_SETTINGS}) -> Tensor", prepare=_layer_norm, reference=_layer_norm_on_cpu
)
add_layer_norm = define_op(
    f"add_layer_norm(Tensor x, Tensor residual, {_SETTINGS}) -> (Tensor, Tensor)",
    prepare=_add_layer_norm,
    reference=_add_layer_norm_on_cpu,
)
layer_norm_and_fp8 = define_op(
    f"layer_norm_and_fp8(Tensor x, {_SETTINGS}, Tensor factor) -> (Tensor, Tensor)",
    prepare=_layer_norm_and_fp8,
    reference=_layer_norm_and_fp8_on_cpu,
)
