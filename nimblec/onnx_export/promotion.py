"""Numbers of another type than what they are computed with, where torch.onnx.export's type promotion fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx._internal.exporter import _fx_passes

aten = torch.ops.aten


@contextmanager
def even_types() -> Iterator[None]:
    """Give torch.onnx.export both bounds of a clamp as floats where one is, and floats to subtract from a float.

    Its type promotion makes a tensor of the other bound, and finds no overload for a number less a tensor.
    """
    before = _fx_passes.insert_type_promotion_nodes

    def insert(graph_module: torch.fx.GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.target is aten.clamp.default and any(isinstance(b, float) for b in _bounds(node)):
                node.args = (node.args[0], *map(_float, node.args[1:]))
                node.kwargs = {name: _float(value) for name, value in node.kwargs.items()}
            elif node.target is aten.sub.Tensor and isinstance(node.args[0], float):
                node.args = (node.args[0], _cast(node, node.args[1]))
        before(graph_module)

    _fx_passes.insert_type_promotion_nodes = insert
    try:
        yield
    finally:
        _fx_passes.insert_type_promotion_nodes = before


def _bounds(node: torch.fx.Node) -> tuple[Any, ...]:
    return (*node.args[1:], *node.kwargs.values())


def _float(bound: Any) -> Any:
    return float(bound) if isinstance(bound, int) else bound


def _cast(node: torch.fx.Node, operand: torch.fx.Node) -> torch.fx.Node:
    """Return an operand in the type of the result."""
    value, dtype = operand.meta["val"], node.meta["val"].dtype
    if value.dtype == dtype:
        return operand
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(aten._to_copy.default, (operand,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": value.to(dtype)}
    return cast
