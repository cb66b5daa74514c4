"""Views of all of a value: where their axes come from, and where their elements lie."""

from math import prod

import torch
from torch import fx

from nimblec.optimize.rewriter import Rewriter, fake, is_call
from nimblec.optimize.simplify import RESHAPES, TRANSPOSES, permutation

aten = torch.ops.aten

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
WHOLE_VIEWS = (*RESHAPES, *TRANSPOSES, aten.unsqueeze.default, *_SQUEEZES)
"""Calls whose result has each element of their first argument once; reshapes may copy."""


def axis_before(view: fx.Node, axis: int) -> int | None:
    """The axis of the argument of a whole view that ``axis`` of its result is; None where that is split or joined."""
    if is_call(view, *TRANSPOSES):
        return permutation(view)[axis]
    (source,) = view.all_input_nodes
    before, after = fake(source).shape, fake(view).shape
    places = ((length, prod(before[i + 1 :])) for i, length in enumerate(before))
    wanted = after[axis], prod(after[axis + 1 :])
    return next((i for i, place in enumerate(places) if place == wanted), None)


def viewed_alike(rewriter: Rewriter, node: fx.Node, views: list[fx.Node], *, at: fx.Node) -> fx.Node:
    """The same views of ``node``, one of another, as ``views`` are."""
    for view in views:
        node = rewriter.call(view.target, node, *view.args[1:], at=at, **view.kwargs)
    return node


def as_stored(rewriter: Rewriter, node: fx.Node, shape: list[int], *, at: fx.Node) -> fx.Node:
    """A view of ``node``, which is dense, of ``shape`` without gaps: its elements in their order in memory."""
    strides = fake(node).stride()
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    if order != sorted(order):
        node = rewriter.call(aten.permute.default, node, order, at=at)
    return node if list(fake(node).shape) == shape else rewriter.call(aten.reshape.default, node, shape, at=at)
