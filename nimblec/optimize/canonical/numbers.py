"""Constants of no axes as Python numbers."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, fake
from nimblec.graph.scalars import number
from nimblec.graph.vocabulary import is_like

aten = torch.ops.aten


def inline_numbers(module: fx.GraphModule) -> None:
    """Sums and products of floating tensors with constants of no axes take them as numbers."""
    rewriter = Rewriter(module)
    for node in rewriter.calls(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
        left, right = node.args[:2]
        if _keeps_floats(node, left) and _is_number(rewriter, right):
            node.args = (left, number(rewriter, right))
        elif _keeps_floats(node, right) and _is_number(rewriter, left) and _commutes(node):
            node.args = (right, number(rewriter, left))
    rewriter.finish()


def _commutes(node: fx.Node) -> bool:
    alpha: Any = node.kwargs.get("alpha", 1)
    return node.target is not aten.sub.Tensor and bool(alpha == 1)


def _is_number(rewriter: Rewriter, argument: Any) -> bool:
    value = rewriter.value(argument)
    return value is not None and value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool


def _keeps_floats(node: fx.Node, argument: Any) -> bool:
    """Whether the result has the floating dtype and the shape of one argument."""
    return isinstance(argument, fx.Node) and fake(node).dtype.is_floating_point and is_like(argument, node)
