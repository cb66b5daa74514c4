"""Attention masks: what is added to the scores of an attention, to hide some of them."""

from typing import Any

import torch
from torch import fx

from nimblec.optimize import autocast
from nimblec.optimize.rewriter import bound, is_call, views

aten = torch.ops.aten


def scores_and_masks(graph: fx.Graph) -> set[fx.Node]:
    """What softmaxes are taken of, and what is added up there, through views."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if autocast.name(node) in autocast.SOFTMAXES:
            _reach(node.args[0], reached)
        elif autocast.name(node) in autocast.ATTENTIONS and isinstance(mask := bound(node)["attn_mask"], fx.Node):
            _reach(mask, reached)
    return reached


def _reach(node: Any, reached: set[fx.Node]) -> None:
    """Add what a sum is made of."""
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
