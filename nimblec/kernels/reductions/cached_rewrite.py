"""Steps of decoders: attention takes in the rotary embedding before it and the new rows of its cache."""

from dataclasses import dataclass

import torch
from torch import fx

from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, only_user
from nimblec.graph.state import WRITES_STATE, slots
from nimblec.graph.vocabulary import RESHAPES
from nimblec.kernels.call import Call
from nimblec.kernels.reductions.attention_op import attention
from nimblec.kernels.reductions.cached_op import cached_attention, cached_tiling
from nimblec.kernels.reductions.rotation_rewrite import unrotated

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A call ``writer`` that puts ``row`` (batch, heads, 1, size) at ``position`` into ``state``, keys or values."""

    writer: fx.Node
    state: fx.Node
    row: fx.Node
    position: fx.Node


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
        query, new_key, cos, sin = unrotated(query, keys.row)
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
