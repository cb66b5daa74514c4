"""Masks that are inputs: what is added to the scores of an attention, to hide some of them."""

from typing import Any

import torch
from torch import fx

from nimblec.optimize import autocast
from nimblec.optimize.rewriter import bound, is_call, views

aten = torch.ops.aten


def inputs_as_masks(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that are added to scores before a softmax, whose lowest numbers are mostly float32's lowest."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if autocast.name(node) in autocast.SOFTMAXES:
            _reach(node.args[0], reached)
        elif autocast.name(node) in autocast.ATTENTIONS and isinstance(mask := bound(node)["attn_mask"], fx.Node):
            _reach(mask, reached)
    return {node for node in reached if node.op == "placeholder"}


def _reach(node: Any, reached: set[fx.Node]) -> None:
    """Add what a sum of scores and masks is made of, through views."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in reached:
            continue
        reached.add(node)
        if is_call(node, aten.add.Tensor):
            waiting.extend(node.args[:2])
        elif node.op == "call_function" and (viewed := views(node)) is not None:
            waiting.append(viewed)
