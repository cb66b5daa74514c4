"""Calls that scale and shift each channel by constants: inference batch norm, and products and sums with constants."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call
from nimblec.graph.vocabulary import NORMS, is_like

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAffine:
    """``node = source * scale + shift``, in float64.

    ``scale`` and ``shift`` have the length of ``axis``, or 1 where all elements have the same: then
    ``axis`` is None.
    """

    source: fx.Node
    node: fx.Node
    axis: int | None
    scale: Tensor
    shift: Tensor

    def along(self, axis: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scale and shift along ``axis`` on the device of ``like``, if they vary along no other."""
        if self.axis not in (axis, None):
            return None
        return self.scale.to(like.device), self.shift.to(like.device)


def read_affine(rewriter: Rewriter, node: fx.Node) -> ChannelAffine | None:
    """Read ``node`` as a scale and a shift of a value; return None where it does more, or changes dtype or shape."""
    read = _read_norm(rewriter, node) or _read_arithmetic(rewriter, node) or _read_addcmul(rewriter, node)
    if read is None or not fake(node).dtype.is_floating_point:
        return None
    return read if is_like(read.source, node) else None


def _read_norm(rewriter: Rewriter, node: fx.Node) -> ChannelAffine | None:
    """Return the first result of a batch norm in inference whose other results are unused."""
    norm = node.args[0] if node.args else None
    if not (isinstance(norm, fx.Node) and is_call(norm, *NORMS)) or node.args[1:] != (0,) or len(norm.users) != 1:
        return None
    given = bound(norm)
    if given.get("training"):
        return None
    mean, variance = (rewriter.value(given[name]) for name in ("running_mean", "running_var"))
    if mean is None or variance is None:
        return None
    weight, bias = given["weight"], given["bias"]
    scale = torch.rsqrt(variance.double() + given["eps"])
    if weight is not None:
        if (value := rewriter.value(weight)) is None:
            return None
        scale = scale * value.double()
    shift = -mean.double() * scale
    if bias is not None:
        if (value := rewriter.value(bias)) is None:
            return None
        shift = shift + value.double()
    return ChannelAffine(source=given["input"], node=node, axis=1, scale=scale, shift=shift)


def _read_arithmetic(rewriter: Rewriter, node: fx.Node) -> ChannelAffine | None:
    """Return a product or sum of a tensor and a constant that varies along one axis at most."""
    if not is_call(node, *_SUMS, *_PRODUCTS):
        return None
    left, right = argument(node, 0), argument(node, 1)
    source, other = (left, right) if rewriter.value(left) is None else (right, left)
    if not isinstance(source, fx.Node) or not fake(source).dim():
        return None
    vector = _along_axis(rewriter, other, source)
    if vector is None:
        return None
    axis, values = vector
    one, zero = torch.ones_like(values), torch.zeros_like(values)
    alpha: Any = node.kwargs.get("alpha", 1)
    match node.target:
        case aten.mul.Tensor:
            scale, shift = values, zero
        case aten.div.Tensor if source is left:
            scale, shift = one / values, zero
        case aten.add.Tensor:
            scale, shift = (one, alpha * values) if source is left else (alpha * one, values)
        case aten.sub.Tensor:
            scale, shift = (one, -alpha * values) if source is left else (-alpha * one, values)
        case aten.rsub.Scalar if len(node.args) == 2 or node.args[2] == 1:
            scale, shift = -one, values
        case _:
            return None
    return ChannelAffine(source=source, node=node, axis=axis, scale=scale, shift=shift)


def _read_addcmul(rewriter: Rewriter, node: fx.Node) -> ChannelAffine | None:
    """Return an ``addcmul`` by constants for each channel: a batch norm that could not be folded."""
    if not is_call(node, aten.addcmul.default) or node.kwargs:
        return None
    shift, source, scale = (argument(node, place) for place in range(3))
    if fake(source).dim() < 2:
        return None
    shifts, scales = (_along_axis(rewriter, other, source) for other in (shift, scale))
    if shifts is None or scales is None or not shifts[0] == scales[0] == 1:
        return None
    return ChannelAffine(source=source, node=node, axis=1, scale=scales[1], shift=shifts[1])


def _along_axis(rewriter: Rewriter, other: Any, source: fx.Node) -> tuple[int | None, Tensor] | None:
    """Return the one axis that a constant varies along, if any, and its values along it."""
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return None, torch.tensor([other], dtype=torch.float64)
    value, rank = rewriter.value(other), fake(source).dim()
    if value is None or not value.dtype.is_floating_point or value.dim() > rank:
        return None
    aligned = value.reshape((1,) * (rank - value.dim()) + tuple(value.shape))
    axes = [axis for axis, length in enumerate(aligned.shape) if length != 1]
    if len(axes) > 1:
        return None
    return axes[0] if axes else None, aligned.double().reshape(-1)
