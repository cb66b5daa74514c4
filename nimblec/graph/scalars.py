"""Products, sums and quotients with one number, however the front end wrote the number."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, is_call

aten = torch.ops.aten


def number(rewriter: Rewriter, argument: Any) -> float | None:
    """Return the value of a Python number, or of a constant with one that is neither bool nor complex."""
    if isinstance(argument, (int, float)):
        return float(argument)
    value = rewriter.value(argument)
    if value is None or value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
        return None
    return float(value)


def scaled(rewriter: Rewriter, node: Any) -> tuple[fx.Node, float] | None:
    """Return (x, c) where ``node`` is x * c or x / (1 / c)."""
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar):
        return _with_number(rewriter, node)
    if is_call(node, aten.div.Tensor, aten.div.Scalar):
        divisor = number(rewriter, node.args[1])
        if divisor:
            return node.args[0], 1 / divisor
    return None


def shifted(rewriter: Rewriter, node: Any) -> tuple[fx.Node, float] | None:
    """Return (x, c) where ``node`` is x + c."""
    if is_call(node, aten.add.Tensor, aten.add.Scalar) and node.kwargs.get("alpha", 1) == 1:
        return _with_number(rewriter, node)
    return None


def _with_number(rewriter: Rewriter, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the tensor and the number that a call combines, in either order."""
    for x, other in (node.args[:2], node.args[1::-1]):
        value = number(rewriter, other)
        if value is not None and isinstance(x, fx.Node):
            return x, value
    return None
