"""State is written in place by the last passes, after which calls are no longer pure.

Before them the graph takes each tensor of the state and returns its next value. A call that changes rows of the
tensor (a new key of a cache) becomes a write of these rows, if all readers of the old rows can come before it; a
pointwise call writes over what it reads; any other value is copied there at the end.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import chain, pairwise

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from nimblec.base import places
from nimblec.graph.node_order import reorder
from nimblec.graph.outputs import outputs_of
from nimblec.graph.rewriter import Rewriter, argument, bound, fake, is_call, owner, readers
from nimblec.graph.state import WRITES_STATE, StateSlot, slots
from nimblec.graph.views import lies_as
from nimblec.graph.vocabulary import is_like
from nimblec.graph.writes import written_nodes

aten = torch.ops.aten

_SLICES = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
"""Calls that change a slice, and the calls that read it."""

_ROWS = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    **dict.fromkeys(_SLICES, aten.copy_.default),
}
"""Calls that change a part of their first argument, and their forms that write in place."""


def mark_writes(module: fx.GraphModule) -> None:
    """Keep calls that change rows of the state out of regions, and put them after all readers of the old rows."""
    rewriter = Rewriter(module)
    found = slots(module)
    for state, slot in found.items():
        if slot.output is None:
            continue
        _drop_copy(module.graph.output_node(), found)
        for writer in _writers(module, state, slot):
            _drop_copy(writer, found)
    rewriter.finish()
    for state, slot in found.items():
        writers = [writer for writer in _writers(module, state, slot) if writer.target in _ROWS]
        if writers and _put_after_readers(module.graph, state, writers):
            for writer in writers:
                writer.meta[WRITES_STATE] = True


def _drop_copy(reader: fx.Node, state: Collection[fx.Node]) -> None:
    """Let a call read the source of an `aten.copy` that changes neither dtype nor shape, unless that is other state."""
    for copied in reader.all_input_nodes:
        if is_call(copied, aten.copy.default):
            source = argument(copied, 1)
            if is_like(copied, source) and (owner(source) not in state or source is argument(copied, 0)):
                reader.replace_input_with(copied, source)


def write_state(module: fx.GraphModule) -> None:
    """Write state in place, rows and pointwise results without a copy, and no longer return it."""
    rewriter = Rewriter(module)
    found = slots(module)
    copies = []
    for state, slot in found.items():
        writers = _writers(module, state, slot)
        if writers and _put_after_readers(module.graph, state, writers):
            for writer in writers:
                _write_in_place(rewriter, writer)
        elif slot.output is not None and (value := _next_value(module, slot, found)) is not state:
            copies.append((state, value))
    output = module.graph.output_node()
    for state, value in copies:
        copied = rewriter.call(aten.copy_.default, state, value, at=output)
        copied.meta["source"] = value.meta.get("source", "")
    left = {slot.output for slot in found.values()}
    output.args = (tuple(value for i, value in enumerate(outputs_of(module)) if i not in left),)
    _join_counters(rewriter, found)
    rewriter.finish()
    for slot in found.values():
        if slot.is_held:
            _hold(module, slot)


def _join_counters(rewriter: Rewriter, state: Collection[fx.Node]) -> None:
    """Change counters together: batch norms add the same number to theirs, and Adam copies one for each weight."""
    counted: defaultdict[tuple[OpOverload, torch.dtype, int | None], list[fx.Node]] = defaultdict(list)
    for node in rewriter.calls(aten.add_.Tensor, aten.copy_.default):
        counter, change = argument(node, 0), argument(node, 1)
        if counter not in state or node.users or node.kwargs:
            continue
        if is_call(node, aten.copy_.default):
            # A copy of other state must come before that is written.
            if is_like(counter, change) and fake(counter).numel() == 1 and owner(change) not in state:
                counted[aten._foreach_copy_.default, fake(counter).dtype, None].append(node)
        elif type(change) is int:
            counted[aten._foreach_add_.Scalar, fake(counter).dtype, change].append(node)
    for (target, _, number), nodes in counted.items():
        if len(nodes) > 1:
            changes = [argument(n, 1) for n in nodes] if number is None else number
            joined = rewriter.call(target, [argument(n, 0) for n in nodes], changes, at=nodes[-1])
            joined.meta["source"] = places.joined(node.meta.get("source", "") for node in nodes)
            for node in nodes:
                rewriter.graph.erase_node(node)


def _hold(module: fx.GraphModule, slot: StateSlot) -> None:
    """Register the tensor in the module under its name, by which a capture knows it."""
    *path, name = slot.name.split(".")
    holder: torch.nn.Module = module
    for part in path:
        if part not in dict(holder.named_children()):
            holder.add_module(part, torch.nn.Module())
        holder = holder.get_submodule(part)
    if name not in holder._buffers:
        holder.register_buffer(name, slot.tensor)


def _next_value(module: fx.GraphModule, slot: StateSlot, state: dict[fx.Node, StateSlot]) -> fx.Node:
    """Return the next value of a tensor, without the copy that made it an output; a copy of other state is kept."""
    assert slot.output is not None
    value = outputs_of(module)[slot.output]
    while is_call(value, aten.clone.default) and owner(argument(value, 0)) not in state:
        value = argument(value, 0)
    return value


def _writers(module: fx.GraphModule, state: fx.Node, slot: StateSlot) -> list[fx.Node]:
    """Return the calls that may write the state in place, in order; the last one makes its next value."""
    if slot.output is None:
        return []
    found: list[fx.Node] = []
    value = _next_value(module, slot, {})
    if _is_pointwise_over(value, state):
        return [value]
    while value.op == "call_function" and value.target in _ROWS:
        found.insert(0, value)
        value = argument(value, 0)
    if value is not state or not all(lies_as(fake(writer), fake(state).stride()) for writer in found):
        return []
    written = {state, *found}
    given = (leaf for writer in found for leaf in tree_leaves((writer.args[1:], writer.kwargs)))
    if any(isinstance(node, fx.Node) and owner(node) in written for node in given):
        # Such writers read other rows of the tensor than they write.
        return []
    return found


def _is_pointwise_over(call: fx.Node, state: fx.Node) -> bool:
    """Return whether a call computes each element of the next value from the element that it replaces."""
    if not isinstance(call.target, OpOverload) or torch.Tag.pointwise not in call.target.tags:
        return False
    others = [node for node in call.all_input_nodes if node is not state]
    return (
        _in_place(call.target) is not None
        and bool(call.args)
        and call.args[0] is state
        and is_like(call, state)
        and lies_as(fake(call), fake(state).stride())
        and all(owner(node) is not state for node in others)
    )


def _in_place(target: OpOverload) -> OpOverload | None:
    """Return the in-place form of a call, which writes over its first argument; None where there is none."""
    if target in _ROWS:
        return _ROWS[target]
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, target._overloadname, None)


def _write_in_place(rewriter: Rewriter, writer: fx.Node) -> None:
    target = writer.target
    assert isinstance(target, OpOverload)
    written, in_place = argument(writer, 0), _in_place(target)
    assert in_place is not None
    if target not in _SLICES:
        writer.target = in_place
        return
    given = bound(writer)
    where = (given[name] for name in ("dim", "start", "end", "step", "index") if name in given)
    rows = rewriter.call(_SLICES[target], written, *where, at=writer)
    rewriter.call(in_place, rows, given["src"], at=writer)
    rewriter.replace(writer, written)


def _put_after_readers(graph: fx.Graph, state: fx.Node, writers: list[fx.Node]) -> bool:
    """Put readers of a value before the call that writes over it; False, and nothing changes, where they cannot be."""
    return reorder(graph, chain(_earlier(state, writers), _kept(graph)))


def _earlier(state: fx.Node, writers: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (reader, writer) for each value that a writer replaces."""
    for value, writer in pairwise((state, *writers)):
        yield from ((reader, writer) for reader in readers(value) if reader is not writer)


def _kept(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (earlier, later) for each call that writes memory and each that touches it, in their present order."""
    for writer in graph.nodes:
        for written in written_nodes(writer):
            for other in readers(owner(written)):
                if other is not writer:
                    yield (other, writer) if other < writer else (writer, other)
