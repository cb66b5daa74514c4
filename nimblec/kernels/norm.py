"""Layer norm and RMS norm as ops of ours, alone or with a residual added before.

Weight and bias are read before the kernel waits for those before it: nothing may write them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from nimblec.kernels.candidates import MULTIPROCESSORS
from nimblec.kernels.compiling import Job
from nimblec.kernels.shapes import ceil_div

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The ops live as long as this module."""

_SETTINGS = "Tensor? weight, Tensor? bias, float eps, bool rms, ScalarType dtype, int[] tiling, str trigger"
_LIBRARY.define(f"layer_norm(Tensor x, {_SETTINGS}) -> Tensor")
_LIBRARY.define(f"add_layer_norm(Tensor x, Tensor residual, {_SETTINGS}) -> (Tensor, Tensor)")

WIDEST = 8192
"""Columns that a block can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """``rows`` rows of ``columns`` numbers, each normalised by itself: by mean and variance, or ``rms`` alone."""

    rows: int
    columns: int
    rms: bool = False

    @property
    def width(self) -> int:
        """Of a block: a power of two."""
        return max(32, 1 << (self.columns - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTiling:
    """A block computes ``block_r`` rows."""

    block_r: int
    num_warps: int

    @property
    def numbers(self) -> list[int]:
        """What the ops take as their ``tiling``."""
        return [self.block_r, self.num_warps]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The inverse of `numbers`."""
        block_r, num_warps = numbers
        return cls(block_r=block_r, num_warps=num_warps)


def norm_candidates(shape: Norm, *, limit: int = 4) -> list[NormTiling]:
    """At most ``limit`` tilings, the most promising first: eight numbers a thread, some blocks a multiprocessor."""
    found = []
    for block_r in (1, 2, 4, 8):
        for num_warps in (1, 2, 4, 8):
            numbers = block_r * shape.width / (32 * num_warps)  # that a thread holds
            if (2 <= numbers <= 64 or (block_r, num_warps) == (1, 8)) and (block_r == 1 or block_r <= shape.rows):
                found.append(NormTiling(block_r=block_r, num_warps=num_warps))

    def cost(tiling: NormTiling) -> tuple[float, list[int]]:
        warps = ceil_div(shape.rows, tiling.block_r) * tiling.num_warps / MULTIPROCESSORS
        numbers = tiling.block_r * shape.width / (32 * tiling.num_warps)
        return 8 + numbers + 2 * (tiling.num_warps > 1) + warps * numbers / 16, tiling.numbers

    return sorted(found, key=cost)[:limit]


def norm_settings(shape: Norm, tiling: NormTiling, *, eps: float, trigger: str) -> dict[str, Any]:
    """What is compiled into a kernel: the template's constants and Triton's options."""
    return {
        "ROWS": shape.rows,
        "COLUMNS": shape.columns,
        "EPS": eps,
        "RMS": shape.rms,
        "BLOCK_R": tiling.block_r,
        "BLOCK_C": shape.width,
        "TRIGGER": trigger,
        "num_warps": tiling.num_warps,
        "launch_pdl": trigger != "none",
    }


def norm_job(
    settings: dict[str, Any], *, dtype: str, out_dtype: str, weight: str | None, bias: str | None, residual: bool
) -> Job:
    """The job of a launch by `launch_norm`; dtypes as in "float16"."""
    added = dtype if residual else None
    return Job(kernel="norm", pointers=(dtype, added, weight, bias, added, out_dtype), settings=settings)


def launch_norm(
    shape: Norm,
    tiling: NormTiling,
    *,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    out: Tensor,
    eps: float,
    trigger: str,
) -> None:
    """Write the norm of ``x``, or of ``total`` = ``x`` + ``residual``, to ``out``; all contiguous."""
    from nimblec.kernels.norm_template import norm as template

    constants = norm_settings(shape, tiling, eps=eps, trigger=trigger)
    template[ceil_div(shape.rows, tiling.block_r),](x, residual, weight, bias, total, out, **constants)


def norm_shape(x: Tensor, *, rms: bool) -> Norm:
    """The geometry of a contiguous tensor, normalised over its last axis."""
    assert x.is_contiguous(), f"a tensor of strides {x.stride()} has gaps between its rows"
    return Norm(rows=x.numel() // x.shape[-1], columns=x.shape[-1], rms=rms)


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, dtype: torch.dtype
) -> Tensor:
    """What the kernel computes, in float32 but for the last rounding."""
    y = x.float()
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def _fake(
    x: Tensor,
    _weight: Tensor | None,
    _bias: Tensor | None,
    _eps: float,
    _rms: bool,
    dtype: torch.dtype,
    *_how: object,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _launched(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
    tiling: Sequence[int],
    trigger: str,
) -> tuple[Tensor, Tensor | None]:
    """The norm, and the sum that it is of where there is a residual."""
    if residual is not None:
        assert residual.is_contiguous(), f"a residual of strides {residual.stride()} has gaps between its rows"
    out, total = x.new_empty(x.shape, dtype=dtype), None if residual is None else x.new_empty(x.shape)
    launch_norm(
        norm_shape(x, rms=rms),
        NormTiling.of(tiling),
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
        total=total,
        out=out,
        eps=eps,
        trigger=trigger,
    )
    return out, total


def _cuda(x: Tensor, *settings: Any) -> Tensor:
    return _launched(x, None, *settings)[0]


def _cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
    *_how: object,
) -> Tensor:
    return normalized(x, weight, bias, eps, rms, dtype)


def _add_fake(x: Tensor, _residual: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return _fake(x, *settings), x.new_empty(x.shape)


def _add_cpu(x: Tensor, residual: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _cpu(total, *settings), total


for _name, _faked, _on_cuda, _on_cpu in (
    ("layer_norm", _fake, _cuda, _cpu),
    ("add_layer_norm", _add_fake, _launched, _add_cpu),
):
    torch.library.register_fake(f"nimblec::{_name}", _faked, lib=_LIBRARY)
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    _LIBRARY.impl(_name, _on_cpu, "CPU")

layer_norm: OpOverload = torch.ops.nimblec.layer_norm.default
add_layer_norm: OpOverload = torch.ops.nimblec.add_layer_norm.default
