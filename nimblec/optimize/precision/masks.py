"""Attention masks: what is added to the scores of an attention, to hide some of them."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import bound, is_call, views
from nimblec.optimize.precision import autocast

aten = torch.ops.aten

_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor)


def added_to_scores(graph: fx.Graph) -> set[fx.Node]:
    """What is added up to what a softmax is taken of, and the masks of attention calls, through views."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if autocast.name(node) in autocast.SOFTMAXES and is_call(scores := _viewed(node.args[0]), aten.add.Tensor):
            _reach(scores, reached)
        elif autocast.name(node) in autocast.ATTENTIONS and isinstance(mask := bound(node)["attn_mask"], fx.Node):
            _reach(mask, reached)
    return reached


def _viewed(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (source := views(node)) is not None:
        node = source
    return node


def _reach(node: fx.Node, reached: set[fx.Node]) -> None:
    """Add what a sum is made of, and what that is a multiple of."""
    waiting: list[Any] = [node]
    while waiting:
        term = waiting.pop()
        if not isinstance(term, fx.Node) or term in reached:
            continue
        reached.add(term)
        if is_call(term, *_ARITHMETIC):
            waiting.extend(term.args[:2])
        elif term.op == "call_function":
            waiting.append(views(term))
