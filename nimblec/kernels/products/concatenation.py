"""Concatenated channels: the kernels write each part to its place in the whole, without copies.

A dense block (DenseNet, Huang et al. 2017) concatenates its parts again and again, each time one more.
All these concatenations lie in the memory of the last one (Pleiss et al., "Memory-Efficient
Implementation of DenseNets", 2017). Where one launch computes the first part and siblings of it that
are not concatenated (`siblings.py`), the siblings lie in front, in the same memory.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import is_not

import torch
from torch import fx

from nimblec.graph.outputs import output_strides, restore_strides
from nimblec.graph.rewriter import Rewriter, bound, fake, is_call, only_user
from nimblec.graph.views import is_channels_last
from nimblec.graph.vocabulary import POOLS
from nimblec.kernels.images import ALIGNMENT_NBYTES
from nimblec.kernels.products.gemm_match import ProductRequest, requests
from nimblec.kernels.products.parts import joined, place

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Concatenations of prefixes of ``parts``, by the number of parts: the first is of all parts.

    A first part that is a slice, the last channels of a result, stands as that whole result. Kernels write the parts
    ``written`` to their place, and all calls read them there.
    """

    parts: tuple[fx.Node, ...]
    prefixes: Mapping[fx.Node, int]
    written: Collection[fx.Node]


def begins_concatenations(part: fx.Node) -> bool:
    """Return whether only concatenations of channels read the images, as their first part."""
    users = list(part.users)
    return bool(users) and all(
        is_call(user, aten.cat.default)
        and _is_of_channels(user)
        and bound(user)["tensors"][0] is part
        and bound(user)["tensors"].count(part) == 1
        for user in users
    )


def concatenate_in_place(module: fx.GraphModule) -> None:
    """Replace concatenations by parts in one memory, where that saves copies; comes before `use_triton_kernels`.

    Each part has a `place` call, which `use_triton_kernels` fuses into the convolution that computes the part. Other
    parts are copied to their places: concatenations with no fewer such parts than copies of their own stay.
    """
    rewriter = Rewriter(module)
    found = [node for node in rewriter.calls(aten.cat.default) if _is_of_channels(node)]
    convolutions = [request for request in requests(module) if request.kind != "linear"] if found else []
    wholes = list(_wholes(found, convolutions))
    if not wholes:
        return
    strides = output_strides(module)
    replaced: dict[fx.Node, fx.Node] = {}
    for whole in wholes:
        parts = [replaced.get(part, part) for part in whole.parts]  # a part may be a replaced concatenation
        replaced |= _take_apart(rewriter, parts, whole)
    rewriter.propagate()
    restore_strides(module, strides)
    rewriter.finish()


def _wholes(found: Collection[fx.Node], convolutions: Sequence[ProductRequest]) -> Iterator[_Whole]:
    """Yield the concatenations to replace; the results of ``convolutions`` need no copy."""
    written = {request.nodes[-1] for request in convolutions}
    readers = {(read, node) for each in convolutions for read in (each.x, each.residual) for node in each.nodes}
    parts = {node: _parts(node, found) for node in found}
    left = sorted(found, key=lambda node: len(parts[node]), reverse=True)
    while left:
        longest, every = left[0], parts[left[0]]
        prefixes = {node: len(parts[node]) for node in left if parts[node] == every[: len(parts[node])]}
        users = {*prefixes, *(inner for node in prefixes for inner in _inner(node, found))}
        left = [node for node in left if node not in users]
        front = _front(every[0], written)
        computed = written if front is None else {*written, every[0]}
        reading = {p: [u for u in p.users if u not in users and not is_call(u, *POOLS)] for p in every}
        placed = {p for p in every if p in computed and all((p, u) in readers for u in reading[p])}
        copies = len(every) - len(placed)
        if len(set(every)) == len(every) and copies < len(prefixes) and _is_aligned(longest, every):
            if front is not None:
                every, placed = (front, *every[1:]), {*placed, front}
            yield _Whole(parts=every, prefixes=prefixes, written=placed)


def _front(part: fx.Node, written: Collection[fx.Node]) -> fx.Node | None:
    """Return the call in ``written`` whose last channels are ``part``, if only slices of it are read."""
    if not is_call(part, aten.slice.Tensor):
        return None
    given = bound(part)
    images, begin = given["self"], given["start"] or 0
    is_last = given["dim"] == 1 and given["step"] == 1 and begin + fake(part).shape[1] == fake(images).shape[1]
    is_read_in_parts = all(is_call(user, aten.slice.Tensor) for user in images.users)
    return images if images in written and is_last and is_read_in_parts else None


def _is_of_channels(node: fx.Node) -> bool:
    """Return whether it concatenates channels of images of several pixels, channels last."""
    value = fake(node)
    has_pixels = value.numel() > value.shape[:2].numel()
    return bound(node)["dim"] in {1, -3} and has_pixels and is_channels_last(value)


def _parts(node: fx.Node, joins: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the parts of a concatenation, those of concatenations inside it included."""
    parts: list[fx.Node] = []
    for part in bound(node)["tensors"]:
        parts += _parts(part, joins) if _is_inner(part, node, joins) else (part,)
    return tuple(parts)


def _inner(node: fx.Node, joins: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield the concatenations inside a concatenation."""
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


def _take_apart(rewriter: Rewriter, parts: Sequence[fx.Node], replacing: _Whole) -> dict[fx.Node, fx.Node]:
    """Replace concatenations; the calls that stand for them.

    The first of ``parts`` may begin with channels that are not concatenated.
    """
    prefixes = replacing.prefixes
    longest = next(iter(prefixes))
    first = min((part for part in parts if part.op == "call_function"), default=longest)
    value = fake(longest)
    ends = list(accumulate(fake(part).shape[1] for part in parts))
    in_front = ends[-1] - value.shape[1]
    shape = [value.shape[0], ends[-1], *value.shape[2:]]
    strides = torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()
    how = {"dtype": value.dtype, "device": value.device}
    memory = rewriter.call(aten.empty_strided.default, shape, list(strides), at=first, **how)
    placed = []
    for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
        where = rewriter.call(aten.slice.Tensor, memory, 1, begin, end, at=first)
        at = part.next if part.op == "call_function" else first
        placed.append(rewriter.call(place, where, part, at=at))
        if part in replacing.written:
            part.replace_all_uses_with(placed[-1], delete_user_cb=partial(is_not, placed[-1]))
    whole = memory
    if in_front:
        whole = rewriter.call(aten.slice.Tensor, memory, 1, in_front, ends[-1], at=first)
    replaced = {}
    for node, count in prefixes.items():
        replaced[node] = rewriter.call(joined, whole, placed[:count], ends[count - 1] - in_front, at=node)
        rewriter.replace(node, replaced[node])
    return replaced
