"""Bounds of clamp that torch.onnx.export refuses: one an int, the other a float."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx._internal.exporter import _fx_passes


@contextmanager
def even_bounds() -> Iterator[None]:
    """Give torch.onnx.export both bounds as floats where one is: its type promotion makes a tensor of the other."""
    before = _fx_passes.insert_type_promotion_nodes

    def insert(graph_module: torch.fx.GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.clamp.default and any(isinstance(b, float) for b in _bounds(node)):
                node.args = (node.args[0], *map(_float, node.args[1:]))
                node.kwargs = {name: _float(value) for name, value in node.kwargs.items()}
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
