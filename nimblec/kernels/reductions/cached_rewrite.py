"""Steps of decoders: attention takes in the rotary embedding before it and the new rows of its cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user, views
from nimblec.graph.state import WRITES_STATE, slots
from nimblec.graph.vocabulary import RESHAPES, is_like
from nimblec.kernels.call import Call
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.cached_op import cached_attention, cached_tiling

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A call ``writer`` that puts ``row`` (batch, heads, 1, size) at ``position`` into ``state``, keys or values."""

    writer: fx.Node
    state: fx.Node
    row: fx.Node
    position: fx.Node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rotation:
    """A rotary embedding of ``x``, whose pairs are from both halves of a head: ``x * cos + (-second, first) * sin``."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def attend_to_caches(module: fx.GraphModule) -> None:
    """Have attention of one query write the new rows of its cache, and rotate them and the query.

    Only where nothing else reads the cache: its old and new values are the same memory from now on.
    """
    rewriter = Rewriter(module)
    for node in rewriter.calls(attention):
        query, mask, scale, trigger = (bound(node)[name] for name in ("query", "mask", "scale", "trigger"))
        keys, values = (_write(rewriter, bound(node)[name], node) for name in ("key", "value"))
        if fake(query).shape[2] != 1 or bound(node)["causal"] or keys is None or values is None:
            continue
        if keys.position is not values.position:
            continue
        turned, new = _rotation(query), _rotation(keys.row)
        new_key, cos, sin = keys.row, None, None
        if turned and new and (turned.cos, turned.sin) == (new.cos, new.sin):
            query, new_key, cos, sin = turned.x, new.x, new.cos, new.sin
        kept = fake(keys.state)
        tiling = cached_tiling(kept.shape[2], kept.shape[3], fake(values.state).shape[3], kept.element_size())
        rows = (keys.state, values.state, new_key, values.row, keys.position)
        call = Call(op=cached_attention, args=(query, *rows, mask, cos, sin, scale, tiling, trigger))
        rewriter.replace(node, call.put(rewriter, at=node))
        for write in (keys, values):
            write.writer.replace_all_uses_with(write.state)
    rewriter.finish()


def _write(rewriter: Rewriter, writer: fx.Node, reader: fx.Node) -> _Write | None:
    """Match a write of one row into state that nothing but ``reader`` reads."""
    if WRITES_STATE not in writer.meta or only_user(state := argument(writer, 0)) is not writer:
        return None
    slot, outputs = slots(rewriter.module).get(state), outputs_of(rewriter.module)
    if slot is None or slot.output is None or outputs[slot.output] is not writer or outputs.count(writer) > 1:
        return None
    found = _row(writer) if {*writer.users} == {reader, rewriter.graph.output_node()} else None
    if found is None or fake(state).dim() != 4:
        return None
    row, position = found
    batch, heads, _, size = fake(state).shape
    shape = [batch, heads, 1, size]
    if fake(row).numel() != batch * heads * size or fake(row).dtype != fake(state).dtype:
        return None
    if list(fake(row).shape) != shape:
        # An assignment to rows drops the axis of one sequence.
        before = argument(row, 0) if is_call(row, *RESHAPES) else row
        is_whole = list(fake(before).shape) == shape
        row = before if is_whole else rewriter.call(aten.reshape.default, row, shape, at=writer)
    return _Write(writer=writer, state=state, row=row, position=position)


def _row(writer: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the row that a call writes along axis 2, and its position, whose first axis may be the batch."""
    given = bound(writer)
    if is_call(writer, aten.index_copy.default):
        is_row = given["dim"] % 4 == 2 and fake(given["index"]).numel() == 1
        return (given["source"], given["index"]) if is_row else None
    if is_call(writer, aten.index_put.default):
        *before, position = (*given["indices"], None, None)[:3]
        is_row = before == [None, None] and not any(given["indices"][3:]) and not given["accumulate"]
        return (given["values"], position) if is_row and position and fake(position).numel() == 1 else None
    if is_call(writer, aten.scatter.src):
        index = fake(given["index"])
        is_row = given["dim"] % 4 == 2 and index.shape == fake(given["src"]).shape
        is_shared = all(n == 1 or stride == 0 for n, stride in zip(index.shape[1:], index.stride()[1:], strict=True))
        return (given["src"], given["index"]) if is_row and is_shared else None
    return None


def _rotation(node: fx.Node) -> _Rotation | None:
    """Match a rotary embedding that is read once, by cosines and sines of each position that all heads share."""
    if not is_call(node, aten.add.Tensor) or bound(node)["alpha"] != 1 or only_user(node) is None:
        return None
    for straight, turned in (node.args[:2], node.args[1::-1]):
        for x, cos in _factors(straight):
            for joined, sin in _factors(turned):
                is_shared = _is_shared(cos, node) and _is_shared(sin, node)
                if is_like(x, node) and is_like(joined, node) and is_shared and _is_turned(joined, x):
                    return _Rotation(x=x, cos=cos, sin=sin)
    return None


def _factors(product: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the two factors of a product, in both orders."""
    if is_call(product, aten.mul.Tensor):
        first, second = product.args
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            yield first, second
            yield second, first


def _is_shared(angles: fx.Node, x: fx.Node) -> bool:
    """Return whether there are as many of the dtype of x (batch, heads, 1, size) for each sequence, or for all."""
    value, (batch, _, _, size) = fake(angles), fake(x).shape
    shape = (1,) * (4 - value.dim()) + tuple(value.shape)
    return value.dtype == fake(x).dtype and len(shape) == 4 and shape[0] in (1, batch) and shape[1:] == (1, 1, size)


def _is_turned(joined: fx.Node, x: fx.Node) -> bool:
    """Return whether a value is the second half of x, negated, and the first half after it."""
    if not is_call(joined, aten.cat.default) or bound(joined)["dim"] % 4 != 3 or len(argument(joined, 0)) != 2:
        return False
    second, first = argument(joined, 0)
    return is_call(second, aten.neg.default) and _is_half(first, x, 0) and _is_half(argument(second, 0), x, 1)


def _is_half(part: fx.Node, x: fx.Node, number: int) -> bool:
    """Return whether a view is the first half of x along the last axis, number 0, or the second."""
    if views(part) is not x:
        return False
    half, whole = fake(part), fake(x)
    begin = half.storage_offset() - whole.storage_offset()
    length = whole.shape[3] // 2
    return bool(
        whole.shape[3] % 2 == 0
        and half.shape == (*whole.shape[:3], length)
        and half.stride() == whole.stride()
        and begin == number * length * whole.stride(3)
    )
