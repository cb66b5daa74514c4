"""From tensors to a launch of a Triton kernel."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nimblec.kernels.reference import Prologue, RowNorm
from nimblec.kernels.shapes import Convolution, Tiling

Trigger = Literal["none", "late", "early"]
"""When a launch lets the next one start: at its end, after its own wait, or before all else."""
TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)

Arithmetic = Literal["tf32", "tf32x3"]
"""How tensor cores multiply float32: without its last 13 bits, or with all of them, in three products."""


def launch_convolution(
    shape: Convolution,
    tiling: Tiling,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    prologue: Prologue,
    out: Tensor,
    counters: Tensor | None,
    activation: str,
    trigger: str,
    arithmetic: str,
    norm: RowNorm | None = None,
    out_moments: Tensor | None = None,
) -> None:
    """Write the convolution of ``x`` to ``out``, rows of ``shape.out_stride`` elements in memory.

    For products ``norm`` is of the rows of ``x``; ``out_moments`` takes those of ``out``, of whose rows each
    tile then has ``block_n`` columns.
    """
    from nimblec.kernels.convolution_template import convolution

    down, across = tiling.tiles(shape)
    partials = None
    if tiling.split_k > 1:
        sums = down * across * tiling.split_k, tiling.block_m * tiling.block_n
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    read = (None, None) if norm is None else (norm.moments, norm.column_sums)
    shared = partials, counters if tiling.split_k > 1 else None
    pointers = (x, weight, bias, residual, *prologue.tensors, *read, out, out_moments, *shared)
    how: dict[str, Any] = {"activation": activation, "trigger": trigger, "arithmetic": arithmetic}
    if norm is not None:
        how |= norm.settings
    constants = settings(shape, tiling, before=prologue.activation, **how)
    convolution[tiling.blocks(shape),](*pointers, **constants)


def settings(
    shape: Convolution,
    tiling: Tiling,
    *,
    activation: str,
    trigger: str,
    before: str = "none",
    arithmetic: str = "tf32",
    norm: str = "none",
    eps: float = 0.0,
    parts: int = 1,
) -> dict[str, Any]:
    """What is compiled into a kernel: the template's constants and Triton's options."""
    return {
        **geometry(shape),
        "OUT_CHANNELS": shape.out_channels,
        "OUT_STRIDE": shape.out_stride or shape.out_channels,
        "BEFORE": before,
        "NORM": norm,
        "EPS": eps,
        "PARTS": parts,
        "ACTIVATION": activation,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "SPLIT_K": tiling.split_k,
        "PRECISION": arithmetic,
        "TRIGGER": trigger,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "launch_pdl": trigger != "none",
    }


def geometry(shape: Convolution) -> dict[str, int]:
    """The constants that all templates share."""
    return {
        "ROWS": shape.rows,
        "HEIGHT": shape.height,
        "WIDTH": shape.width,
        "CHANNELS": shape.channels,
        "PIXEL_STRIDE": shape.pixel_stride or shape.channels,
        "OUT_HEIGHT": shape.out_height,
        "OUT_WIDTH": shape.out_width,
        "KERNEL_H": shape.kernel[0],
        "KERNEL_W": shape.kernel[1],
        "STRIDE_H": shape.stride[0],
        "STRIDE_W": shape.stride[1],
        "PADDING_H": shape.padding[0],
        "PADDING_W": shape.padding[1],
        "DILATION_H": shape.dilation[0],
        "DILATION_W": shape.dilation[1],
    }
