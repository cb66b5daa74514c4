"""Constants without axes as Python numbers."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.scalars import number
from nimblec.graph.vocabulary import is_like

aten = torch.ops.aten


def inline_numbers(module: fx.GraphModule) -> None:
    """Replace constants without axes by numbers in sums and products of floating-point tensors."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
        left, right = node.args[:2]
        if _keeps_floats(node, left) and (value := _scalar(rewriter, right)) is not None:
            node.args = (left, value)
        elif _keeps_floats(node, right) and _commutes(node) and (value := _scalar(rewriter, left)) is not None:
            node.args = (right, value)
    rewriter.finish()


def _commutes(node: fx.Node) -> bool:
    alpha: Any = node.kwargs.get("alpha", 1)
    return node.target is not aten.sub.Tensor and bool(alpha == 1)


def _scalar(rewriter: Rewriter, argument: Any) -> float | None:
    """Return the value of a constant without axes."""
    value = rewriter.value(argument)
    return None if value is None or value.dim() else number(rewriter, argument)


def _keeps_floats(node: fx.Node, argument: Any) -> bool:
    """Return whether the result has the floating-point dtype and the shape of one argument."""
    return isinstance(argument, fx.Node) and fake(node).dtype.is_floating_point and is_like(argument, node)
