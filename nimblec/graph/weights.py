"""Constant weights of convolutions and linears, and how much of them rounding may lose."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nimblec.graph.rewriter import Rewriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights and bias of a convolution or linear; the bias is zeros where there is none."""

    weight: Tensor
    bias: Tensor


def constant_weights(rewriter: Rewriter, weight_node: Any, bias_node: Any, channels: int) -> Weights | None:
    """Return constant weights and bias (channels,) of one floating dtype."""
    weight = rewriter.value(weight_node)
    if weight is None or not weight.dtype.is_floating_point:
        return None
    if bias_node is None:
        return Weights(weight=weight, bias=torch.zeros(channels, dtype=weight.dtype, device=weight.device))
    bias = rewriter.value(bias_node)
    if bias is None or bias.numel() != channels or bias.shape[-1:] != (channels,) or bias.dtype != weight.dtype:
        return None
    return Weights(weight=weight, bias=bias.reshape(-1))


def rounded_weights(old: Tensor, weight: Tensor, bias: Tensor, *, axis: int) -> Weights | None:
    """Round new weights to the dtype of ``old``; return None where rounding would lose too much.

    A float32 model may be cast to half precision later: weights that fit float16 must still fit it.
    """
    dtypes = [old.dtype]
    if old.dtype == torch.float32 and _keeps(old.double(), torch.float16, axis=axis):
        dtypes.append(torch.float16)
    new = Weights(weight=weight.to(old.dtype), bias=bias.to(old.dtype))
    kept = all(_keeps(weight, dtype, axis=axis) for dtype in dtypes)
    return new if kept and bool(new.bias.isfinite().all()) else None


def _keeps(weight: Tensor, dtype: torch.dtype, *, axis: int) -> bool:
    """Return whether in ``dtype`` no channel along ``axis`` loses more than the rounding of the largest one.

    Weights of a channel whose scale is almost zero may fall below the normal range.
    """
    others = [n for n in range(weight.dim()) if n != axis]
    lost = torch.linalg.vector_norm(weight.to(dtype).double() - weight, dim=others)
    allowed = torch.finfo(dtype).eps * torch.linalg.vector_norm(weight, dim=others).max()
    return bool((lost <= allowed).all())
