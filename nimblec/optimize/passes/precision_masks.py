"""Attention masks: terms added to the scores of an attention to hide some of them."""

from typing import Any

import torch
from torch import fx

from nimblec.graph.rewriter import bound, is_call, owner, views
from nimblec.graph.walk import reached
from nimblec.optimize.passes import autocast

aten = torch.ops.aten

_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor)


def added_to_scores(graph: fx.Graph) -> set[fx.Node]:
    """The terms of sums that a softmax is taken of, and the masks of attention calls, through views."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if autocast.name(node) in autocast.SOFTMAXES and is_call(scores := owner(node.args[0]), aten.add.Tensor):
            found |= reached(scores, _terms)
        elif autocast.name(node) in autocast.ATTENTIONS and isinstance(mask := bound(node)["attn_mask"], fx.Node):
            found |= reached(mask, _terms)
    return found


def _terms(node: fx.Node) -> list[fx.Node]:
    """The arguments of a sum or product, and of a view."""
    terms: tuple[Any, ...] = node.args[:2] if is_call(node, *_ARITHMETIC) else (views(node),)
    return [term for term in terms if isinstance(term, fx.Node)]
