"""Concatenated channels: our kernels write each part where it belongs, and nothing copies them.

A dense block (DenseNet, Huang et al. 2017) concatenates its first parts again and again, each time
one more. All of these lie in the memory of the last one (Pleiss et al., "Memory-Efficient
Implementation of DenseNets", 2017).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from nimblec.kernels.ops import ALIGNMENT_NBYTES
from nimblec.kernels.parts import joined, place
from nimblec.optimize.layout import is_channels_last
from nimblec.optimize.outputs import output_strides, restore_strides
from nimblec.optimize.own_kernels import requests
from nimblec.optimize.rewriter import Rewriter, bound, fake, only_user

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Concatenations of the first so many of ``parts``, by their number: the longest one, of all, comes first."""

    parts: tuple[fx.Node, ...]
    prefixes: Mapping[fx.Node, int]


def place_parts(module: fx.GraphModule) -> None:
    """Take concatenations apart where that spares copies, before `use_own_kernels`.

    The parts that our convolutions compute have a call that `use_own_kernels` takes in. What else is a
    part is copied to its place: done only where fewer are than concatenations were.
    """
    rewriter = Rewriter(module)
    found = [node for node in rewriter.calls(aten.cat.default) if _is_of_channels(node)]
    written = {request.nodes[-1] for request in requests(module) if request.kind == "convolution"} if found else ()
    wholes = list(_wholes(found, written))
    if not wholes:
        return
    strides = output_strides(module)
    replaced: dict[fx.Node, fx.Node] = {}
    for whole in wholes:
        parts = [replaced.get(part, part) for part in whole.parts]  # one may have been a concatenation itself
        replaced |= _take_apart(rewriter, parts, whole.prefixes)
    rewriter.propagate()
    restore_strides(module, strides)
    rewriter.finish()


def _wholes(found: Collection[fx.Node], written: Collection[fx.Node]) -> Iterator[_Whole]:
    """Of the concatenations ``found`` those to take apart; ``written`` are the parts that need no copy."""
    parts = {node: _parts(node, found) for node in found}
    left = sorted(found, key=lambda node: len(parts[node]), reverse=True)
    while left:
        longest, every = left[0], parts[left[0]]
        prefixes = {node: len(parts[node]) for node in left if parts[node] == every[: len(parts[node])]}
        users = {*prefixes, *(inner for node in prefixes for inner in _inner(node, found))}
        left = [node for node in left if node not in users]
        copied = [p for p in every if p not in written or not users.issuperset(p.users)]
        if len(set(every)) == len(every) and len(copied) < len(prefixes) and _is_aligned(longest, every):
            yield _Whole(parts=every, prefixes=prefixes)


def _is_of_channels(node: fx.Node) -> bool:
    """Whether images of several pixels each, channels last, are joined by their channels."""
    value = fake(node)
    return bound(node)["dim"] in {1, -3} and is_channels_last(value) and value[0, 0].numel() > 1


def _parts(node: fx.Node, joins: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """What is concatenated in the end."""
    parts: list[fx.Node] = []
    for part in bound(node)["tensors"]:
        parts += _parts(part, joins) if _is_inner(part, node, joins) else (part,)
    return tuple(parts)


def _inner(node: fx.Node, joins: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The concatenations inside a concatenation."""
    for part in bound(node)["tensors"]:
        if _is_inner(part, node, joins):
            yield part
            yield from _inner(part, joins)


def _is_inner(part: fx.Node, node: fx.Node, joins: Collection[fx.Node]) -> bool:
    return part in joins and only_user(part) is node


def _is_aligned(whole: fx.Node, parts: Sequence[fx.Node]) -> bool:
    itemsize = fake(whole).dtype.itemsize
    alike = all(fake(part).dtype == fake(whole).dtype for part in parts)
    return alike and not any(fake(part).shape[1] * itemsize % ALIGNMENT_NBYTES for part in parts)


def _take_apart(
    rewriter: Rewriter, parts: Sequence[fx.Node], prefixes: Mapping[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """What stands for each of ``prefixes``, which are erased."""
    longest = next(iter(prefixes))
    order = {node: n for n, node in enumerate(rewriter.graph.nodes)}
    first = min((part for part in parts if part.op == "call_function"), key=order.__getitem__, default=longest)
    value = fake(longest)
    shape, strides = list(value.shape), list(value.stride())
    how = {"dtype": value.dtype, "device": value.device}
    memory = rewriter.call(aten.empty_strided.default, shape, strides, at=first, **how)
    ends = list(accumulate(fake(part).shape[1] for part in parts))
    placed = []
    for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
        where = rewriter.call(aten.slice.Tensor, memory, 1, begin, end, at=first)
        at = part.next if part.op == "call_function" else first
        placed.append(rewriter.call(place, where, part, at=at))
    replaced = {}
    for node, count in prefixes.items():
        replaced[node] = rewriter.call(joined, memory, placed[:count], ends[count - 1], at=node)
        rewriter.replace(node, replaced[node])
    return replaced
