"""Views: where their axes come from, and where the elements of a value lie in memory."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, fx

from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, views
from nimblec.graph.vocabulary import BY_STRIDE, LINEARS, TRANSPOSES

aten = torch.ops.aten


def axis_before(view: fx.Node, axis: int) -> int | None:
    """Return the argument's axis that a whole view makes ``axis`` of its result; None for split or joined axes."""
    if is_call(view, *TRANSPOSES):
        return permutation(view)[axis]
    (source,) = view.all_input_nodes
    before, after = fake(source).shape, fake(view).shape
    places = ((length, prod(before[i + 1 :])) for i, length in enumerate(before))
    wanted = after[axis], prod(after[axis + 1 :])
    return next((i for i, place in enumerate(places) if place == wanted), None)


def viewed_alike(rewriter: Rewriter, node: fx.Node, chain: list[fx.Node], *, at: fx.Node) -> fx.Node:
    """Return ``node`` seen through the same ``chain`` of views, each a view of the one before it."""
    for view in chain:
        node = rewriter.call(view.target, node, *view.args[1:], at=at, **view.kwargs)
    return node


def as_stored(rewriter: Rewriter, node: fx.Node, shape: list[int], *, at: fx.Node) -> fx.Node:
    """Return a contiguous view of ``shape`` of a dense node: its elements in their order in memory."""
    strides = fake(node).stride()
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    if order != sorted(order):
        node = rewriter.call(aten.permute.default, node, order, at=at)
    return node if list(fake(node).shape) == shape else rewriter.call(aten.reshape.default, node, shape, at=at)


def permutation(node: fx.Node) -> list[int]:
    """Return the permutation of axes that a transpose makes: result axis i is axis ``[i]`` of its argument."""
    given, rank = bound(node), fake(node).dim()
    if node.target is aten.permute.default:
        return [axis % rank for axis in given["dims"]]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    first, second = given["dim0"] % max(rank, 1), given["dim1"] % max(rank, 1)
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def lies_as(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides; those of axes of length 1 do not matter."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor with these strides, in elements: the given one if it has them, else a copy."""
    if lies_as(tensor, strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether images (4 axes) lie channels last, without gaps."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def is_view(node: fx.Node) -> bool:
    """Return whether the result lies in the memory of an argument; both must have been inferred by one `propagate`."""
    viewed = views(node)
    if viewed is None:
        return False
    value = node.meta["val"]
    part = value[0] if isinstance(value, (tuple, list)) else value
    return part.untyped_storage()._cdata == fake(viewed).untyped_storage()._cdata


def fixed_strides(graph: fx.Graph) -> set[fx.Node]:
    """Return the values whose strides a `BY_STRIDE` call may depend on: all that it is computed from, back to products.

    Products lay out their results independently of their arguments.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in BY_STRIDE:
            found |= reached(node, lambda n: () if is_call(n, *LINEARS, aten.bmm.default) else n.all_input_nodes)
    return found


def replace_by_slices(rewriter: Rewriter, nodes: Sequence[fx.Node], joined: fx.Node) -> None:
    """Replace ``nodes`` by consecutive slices of ``joined`` along axis 1."""
    begin = 0
    for node in nodes:
        end = begin + fake(node).shape[1]
        rewriter.replace(node, rewriter.call(aten.slice.Tensor, joined, 1, begin, end, at=node))
        begin = end


T = TypeVar("T")


def reached(start: T, following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return all that can be reached from ``start`` by ``following``, itself included."""
    found = {start}
    waiting = [start]
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found
