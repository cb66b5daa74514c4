"""Calls that change nothing, and chains of views that are one view."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import fx

from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call
from nimblec.graph.views import fixed_strides, lies_as, permutation
from nimblec.graph.vocabulary import RESHAPES, TRANSPOSES

aten = torch.ops.aten

_GEOMETRY = (3, 4, 5, 7)
"""Places of the arguments of `aten.convolution` that have a number for each axis of the images."""
_PAD = aten.constant_pad_nd.default
_EXPAND = (aten.expand.default,)
_COPIES = (aten.clone.default, aten._to_copy.default, aten.contiguous.default, aten.alias.default, aten.detach.default)


def simplify(module: fx.GraphModule) -> None:
    """Drop calls without effect, join chains of reshapes or transposes, give convolutions numbers for all axes.

    An axis that a reshape makes of several, and that is divided again behind a transpose, is never made.
    """
    rewriter = Rewriter(module)
    fixed = fixed_strides(module.graph)
    for node in list(module.graph.nodes):
        if is_call(node, *RESHAPES):
            _reshape(rewriter, node, is_fixed=node in fixed)
        elif is_call(node, *TRANSPOSES):
            _transpose(rewriter, node, is_fixed=node in fixed)
        elif is_call(node, aten.convolution.default):
            _spell_out(node)
            _take_in_zeros(node, is_fixed=node in fixed)
        elif is_call(node, aten.copy.default):
            # An output that is no copy would be copied again, to have memory of its own.
            if _is_same(node, argument(node, 1)) and module.graph.output_node() not in node.users:
                rewriter.replace(node, argument(node, 1))
        elif is_call(node, aten.cat.default):
            _drop_empty(rewriter, node, is_fixed=node in fixed)
        elif _may_be_copy(node) and _is_same(node, argument(node, 0)):
            rewriter.replace(node, argument(node, 0))
    rewriter.finish()


def _reshape(rewriter: Rewriter, node: fx.Node, *, is_fixed: bool) -> None:
    source = argument(node, 0)
    if is_call(source, *RESHAPES) and not is_fixed:  # the reshape between may copy, which changes the strides
        source = argument(source, 0)
    is_between = is_call(source, *TRANSPOSES) and is_call(argument(source, 0), *RESHAPES) and not is_fixed
    if fake(source).shape == fake(node).shape:
        rewriter.replace(node, source)
    elif is_between and (parts := _parts(fake(source).shape, fake(node).shape)):
        _divide_before(rewriter, node, source, parts)
    elif source is not node.args[0] or node.target is not aten.reshape.default:
        # Unlike ``view``, ``reshape`` works whatever the strides of its argument.
        rewriter.replace(node, rewriter.call(aten.reshape.default, source, list(fake(node).shape), at=node))


def _parts(shape: Sequence[int], finer: Sequence[int]) -> list[list[int]] | None:
    """Return the lengths into which each axis of ``shape`` is divided; None where not each is divided by itself."""
    left, parts = [*finer], []
    for length in shape:
        part: list[int] = []
        while left and (not part or math.prod(part) < length):
            part.append(left.pop(0))
        if math.prod(part) != length:
            return None
        parts.append(part)
    return None if left else parts


def _divide_before(rewriter: Rewriter, node: fx.Node, transposed: fx.Node, parts: list[list[int]]) -> None:
    """Replace a reshape of ``transposed`` that divides each axis into ``parts`` by a transpose of a reshape."""
    order, source = permutation(transposed), argument(argument(transposed, 0), 0)
    before = [part for _, part in sorted(zip(order, parts, strict=True))]
    ends = [*accumulate(map(len, before), initial=0)]
    shape = [length for part in before for length in part]
    divided = rewriter.call(aten.reshape.default, source, shape, at=node)
    axes = [place for axis in order for place in range(ends[axis], ends[axis + 1])]
    rewriter.replace(node, rewriter.call(aten.permute.default, divided, axes, at=node))


def _transpose(rewriter: Rewriter, node: fx.Node, *, is_fixed: bool) -> None:
    order = permutation(node)
    source = argument(node, 0)
    joined = is_call(source, *TRANSPOSES)
    if joined:
        order = [permutation(source)[axis] for axis in order]
        source = argument(source, 0)
    shape = fake(source).shape
    moved = [axis for axis in order if shape[axis] != 1]
    if order == sorted(order):
        rewriter.replace(node, source)
    elif moved == sorted(moved):  # only axes of length 1 change places, as where a batch of one comes second
        reshaped = rewriter.call(aten.reshape.default, source, list(fake(node).shape), at=node)
        rewriter.replace(node, reshaped)
        _reshape(rewriter, reshaped, is_fixed=is_fixed)
    elif joined:
        rewriter.replace(node, rewriter.call(aten.permute.default, source, order, at=node))


def _drop_empty(rewriter: Rewriter, node: fx.Node, *, is_fixed: bool) -> None:
    """Drop parts of a concatenation that have no elements."""
    parts = [part for part in argument(node, 0) if fake(part).numel()]
    if not 0 < len(parts) < len(argument(node, 0)):
        return
    node.update_arg(0, parts)
    if len(parts) == 1 and fake(parts[0]).dtype == fake(node).dtype and (not is_fixed or _is_same(node, parts[0])):
        rewriter.replace(node, parts[0])


def _spell_out(node: fx.Node) -> None:
    """Give strides, padding and dilation of a convolution as a number for each axis, where one stands for all."""
    for place in _GEOMETRY:
        numbers = argument(node, place)
        if isinstance(numbers, Sequence) and len(numbers) == 1:
            node.update_arg(place, [*numbers] * (fake(argument(node, 1)).dim() - 2))


def _take_in_zeros(node: fx.Node, *, is_fixed: bool) -> None:
    """Let a convolution pad its images with as many zeros on both sides as a call before it does."""
    padded = argument(node, 0)
    if is_fixed or not is_call(padded, _PAD) or bound(padded)["value"] or bound(node)["transposed"]:
        return
    before, after = (argument(padded, 1)[side::2][::-1] for side in (0, 1))
    axes = fake(node).dim() - 2
    if [*before] == [*after] and len(before) <= axes and all(n >= 0 for n in before):
        missing = [0] * (axes - len(before))
        node.update_arg(0, argument(padded, 0))
        node.update_arg(4, [has + more for has, more in zip(argument(node, 4), [*missing, *before], strict=True)])


def _may_be_copy(node: fx.Node) -> bool:
    return is_call(node, *_EXPAND, *_COPIES) or (is_call(node, _PAD) and not any(argument(node, 1)))


def _is_same(node: fx.Node, source: fx.Node) -> bool:
    """Return whether values, dtype and strides stay; whether a copy is made does not matter here."""
    before, after = fake(source), fake(node)
    return (
        (before.dtype, before.device, before.shape) == (after.dtype, after.device, after.shape)
        and lies_as(before, after.stride())
        and torch._debug_has_internal_overlap(before) != 1
    )
