"""If, Loop and Scan: branches known at import are taken and short loops unrolled, all others are recorded."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, TypeAlias

import torch
from onnx import GraphProto, NodeProto
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.base.errors import UnsupportedModelError
from nimblec.graph.control import trip_limit
from nimblec.graph.record_control import record_loop, record_rows, record_switch
from nimblec.graph.recorder import Recorder
from nimblec.onnx_import.frame import Frame, Scope
from nimblec.onnx_import.tensors import tensor_of
from nimblec.onnx_ops.axes import axis_of, sizes_of
from nimblec.onnx_ops.counted import counted
from nimblec.onnx_ops.creation import dtype_of
from nimblec.onnx_ops.table import Ints, Refused

Bounds: TypeAlias = Sequence[Ints | None]
"""The largest shape of each output of a node, for those that are outputs of the model and have one."""

MOST_NODES = 20_000
"""A loop may unroll to this many nodes."""


class Walk(Protocol):
    """Evaluates nodes under ``recorder``; ``problems`` has a sentence for each node that was refused."""

    recorder: Recorder
    problems: list[str]

    def nodes(self, nodes: Sequence[NodeProto], scope: Scope, frame: Frame) -> None:
        """Evaluate ``nodes`` in order, and put their outputs into ``scope``."""


def run_graph(walk: Walk, graph: GraphProto, inputs: Sequence[Any], scope: Scope, frame: Frame) -> list[Any]:
    """Evaluate a subgraph, which sees the names around it; return its outputs."""
    local: dict[str, Any] = {proto.name: tensor_of(proto) for proto in graph.initializer}
    local.update(zip((value.name for value in graph.input), inputs, strict=False))
    inner = ChainMap[str, Any](local, scope)
    walk.nodes(graph.node, inner, frame)
    return [inner.get(value.name) for value in graph.output]


def branch(
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame, _bounds: Bounds
) -> list[Any]:
    """Evaluate the branch that the condition takes; both where it is computed while the model runs."""
    if isinstance(inputs[0], FakeTensor):
        return _recorded_branch(walk, inputs[0].reshape(()).to(torch.bool), attributes, scope, frame)
    chosen = attributes["then_branch" if _truth(inputs[0], "condition") else "else_branch"]
    return run_graph(walk, chosen, (), scope, frame)


def _recorded_branch(
    walk: Walk, condition: Tensor, attributes: Mapping[str, Any], scope: Scope, frame: Frame
) -> list[Any]:
    """Record both branches. Where their values differ in sizes, these are padded to the larger and counted."""
    found: list[list[Tensor]] = []
    larger: list[list[int]] = []

    def values(graph: GraphProto, inner: Recorder) -> list[Tensor]:
        made = _body_values(walk, inner, graph, (), scope, frame)
        found.append(made)
        return [_padded(value, sizes) for value, sizes in zip(made, larger, strict=True)] if larger else made

    branches = [partial(values, attributes[name]) for name in ("else_branch", "then_branch")]
    try:
        return list(record_switch(walk.recorder, condition, branches))
    except UnsupportedModelError:
        pairs = list(zip(*found, strict=True)) if len(found) == len(branches) else []
        if not pairs or any(one.dim() != other.dim() for one, other in pairs):
            raise
    larger += [list(map(max, one.shape, other.shape)) for one, other in pairs]
    results = record_switch(walk.recorder, condition, branches)
    counts: dict[tuple[int, int], Tensor] = {}
    counted_values = []
    for result, (one, other) in zip(results, pairs, strict=True):
        own = {}
        for axis, sizes in enumerate(zip(one.shape, other.shape, strict=True)):
            if sizes[0] != sizes[1]:
                # Values of equal sizes share a count, so that they can be combined.
                counts.setdefault(sizes, torch.where(condition, torch.tensor(sizes[1]), torch.tensor(sizes[0])))
                own[axis] = counts[sizes]
        counted_values.append(counted(result, own))
    return counted_values


def _padded(value: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, value.shape, strict=True)]
    return torch.constant_pad_nd(value, [n for size in reversed(missing) for n in (0, size)], 0)


def _body_values(
    walk: Walk, inner: Recorder, graph: GraphProto, inputs: Sequence[Any], scope: Scope, frame: Frame
) -> list[Tensor]:
    """Record a body under a recorder of its own, and return its values, all of which are tensors."""
    around, walk.recorder = walk.recorder, inner
    try:
        values = run_graph(walk, graph, inputs, scope, frame)
    finally:
        walk.recorder = around
    _stop_at_failures(walk, values)
    return _tensors(values)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    if not all(isinstance(value, Tensor) for value in values):
        raise Refused(
            "it hands on a sequence, an optional or a value whose size depends on values, which a loop or branch of a "
            "CUDA plan cannot"
        )
    return list(values)


def _truth(value: Any, what: str) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        raise Refused(f"its {what} is computed while the model runs; it must be known at import")
    return bool(value.reshape(-1)[0])


def loop(
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame, bounds: Bounds
) -> list[Any]:
    """Unroll a loop whose trip count and conditions are known at import; record any other."""
    body: GraphProto = attributes["body"]
    given: list[Any] = [*inputs, *[None] * (2 - len(inputs))]
    trip, going, carried = given[0], given[1], given[2:]
    most = MOST_NODES // max(1, len(body.node))
    start = condition = torch.tensor(True) if going is None else going
    record = partial(_recorded_loop, walk, trip, start, carried, body, scope, frame, bounds)
    if isinstance(trip, FakeTensor):
        return record(rows=None)
    limit = most + 1 if trip is None else int(trip.reshape(-1)[0])
    gathered: list[list[Any]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    step = 0
    while step < limit:
        if isinstance(condition, FakeTensor):
            return record(rows=None)
        if step >= most:
            return record(rows=None if trip is None else [kept[0] for kept in gathered])
        if not _truth(condition, "condition"):
            break
        condition, *values = run_graph(walk, body, (torch.tensor(step), condition, *carried), scope, frame)
        _stop_at_failures(walk, values)
        carried = values[: len(carried)]
        for kept, value in zip(gathered, values[len(carried) :], strict=True):
            kept.append(value)
        step += 1
    ends = body.output[1 + len(carried) :]
    return [*carried, *(_stacked(kept, value, 0) for kept, value in zip(gathered, ends, strict=True))]


def _recorded_loop(
    walk: Walk,
    trip: Tensor | None,
    condition: Tensor,
    carried: Sequence[Any],
    body: GraphProto,
    scope: Scope,
    frame: Frame,
    bounds: Bounds,
    *,
    rows: Sequence[Tensor] | None,
) -> list[Any]:
    """Record a loop whose end is computed while the model runs, or that is too long to unroll.

    ``rows`` are like what each trip adds to the stacked outputs; None where their number is not known. Outputs of the
    model then have ``bounds``.
    """
    count = None if trip is None else trip.reshape(())
    if rows is None or trip is None:
        declared = zip_longest(body.output[1 + len(carried) :], bounds[len(carried) :])
        stacks = [_bounded_stack(value, bound) for value, bound in declared]
    else:
        stacks = [torch.zeros((int(trip), *row.shape), dtype=row.dtype) for row in rows]

    def step(inner: Recorder, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        number, *values = slots
        before, made = values[: len(carried)], values[len(carried) :]
        # A trip begins only while the condition holds.
        going, *values = _body_values(walk, inner, body, (number, torch.tensor(True), *before), scope, frame)
        added = zip(made, values[len(carried) :], strict=True)
        made = [
            stack.index_copy(0, number.reshape(1).clamp(max=stack.shape[0] - 1), row.unsqueeze(0))
            for stack, row in added
        ]
        going, number = going.reshape(()).to(torch.bool), number + 1
        going = going if count is None else going & (number < count)
        return going, [number, *values[: len(carried)], *made]

    limit = trip_limit.get() if count is None or isinstance(count, FakeTensor) else int(count)
    start = condition.reshape(()).to(torch.bool)
    start = start if count is None else start & (count > 0)
    first = [torch.tensor(0), *_tensors(carried), *stacks]
    trips, *results = record_loop(walk.recorder, start, first, step, limit=max(0, limit))
    if rows is not None:
        return results
    return [*results[: len(carried)], *(counted(stack, {0: trips}) for stack in results[len(carried) :])]


def _bounded_stack(declared: Any, bound: Ints | None) -> Tensor:
    """Return memory for the output that a loop stacks over a number of trips that is not known at import."""
    kind = declared.type.tensor_type.elem_type
    if not bound or not kind:
        raise Refused(
            f"stacks its output '{declared.name}' over a number of trips that is not known at import: where it is an "
            "output of the model, give its largest shape, --bound NAME=SHAPE, or compile for --target cpu"
        )
    return torch.zeros(sizes_of(bound), dtype=dtype_of(kind))


def _stop_at_failures(walk: Walk, values: Sequence[Any]) -> None:
    if walk.problems and any(not isinstance(value, (Tensor, list)) and value is not None for value in values):
        raise Refused("its body cannot be imported")


def _stacked(values: Sequence[Any], declared: Any, axis: int) -> Tensor:
    if values:
        return torch.stack(_tensors(values), axis)
    tensor = declared.type.tensor_type
    if not tensor.HasField("shape") or any(not dim.HasField("dim_value") for dim in tensor.shape.dim):
        raise Refused(f"never runs, and the shape of its output '{declared.name}' is not declared")
    shape = [dim.dim_value for dim in tensor.shape.dim]
    shape.insert(axis, 0)
    return torch.zeros(sizes_of(shape), dtype=dtype_of(tensor.elem_type))


def scan(
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame, _bounds: Bounds
) -> list[Any]:
    """Unroll a scan over the slices of its inputs (opset 9 and up), or record it if that takes too many nodes."""
    if frame.opsets[""] < 9:
        raise Refused("Scan of opset 8 is not supported; expected opset 9 or later")
    body: GraphProto = attributes["body"]
    count: int = attributes["num_scan_inputs"]
    states, scanned = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    outputs = len(body.output) - len(states)
    in_axes = _per(attributes, "scan_input_axes", count)
    in_turns = _per(attributes, "scan_input_directions", count)
    out_axes = _per(attributes, "scan_output_axes", outputs)
    out_turns = _per(attributes, "scan_output_directions", outputs)
    axes = [axis_of(axis, tensor.dim()) for axis, tensor in zip(in_axes, scanned, strict=True)]
    lengths = {tensor.shape[axis] for axis, tensor in zip(axes, scanned, strict=True)}
    if len(lengths) != 1:
        raise Refused(f"its inputs have {sorted(lengths)} slices; expected one number")
    length = lengths.pop()
    gathered: list[list[Any]] = [[] for _ in range(outputs)]
    for step in range(length):
        slices = [
            tensor.select(axis, length - 1 - step if turned else step)
            for tensor, axis, turned in zip(scanned, axes, in_turns, strict=True)
        ]
        values = run_graph(walk, body, (*states, *slices), scope, frame)
        if length * max(1, len(body.node)) > MOST_NODES:
            _stop_at_failures(walk, values)
            laid = [_turned(t.movedim(axis, 0), way) for t, axis, way in zip(scanned, axes, in_turns, strict=True)]
            made = _recorded_scan(walk, states, laid, _tensors(values[len(states) :]), body, scope, frame)
            stacks = zip(made[len(states) :], out_axes, out_turns, strict=True)
            outs = [_turned(stack, way).movedim(0, axis_of(axis, stack.dim())) for stack, axis, way in stacks]
            return [*made[: len(states)], *outs]
        _stop_at_failures(walk, values)
        states = values[: len(states)]
        for kept, value in zip(gathered, values[len(states) :], strict=True):
            kept.append(value)
    ends = body.output[len(states) :]
    results = []
    for kept, declared, axis, turned in zip(gathered, ends, out_axes, out_turns, strict=True):
        place = axis_of(axis, kept[0].dim() + 1) if kept else axis
        results.append(_stacked(kept[::-1] if turned else kept, declared, place))
    return [*states, *results]


def _recorded_scan(
    walk: Walk,
    states: Sequence[Any],
    scanned: Sequence[Tensor],
    rows: Sequence[Tensor],
    body: GraphProto,
    scope: Scope,
    frame: Frame,
) -> list[Any]:
    """Record a scan over the rows of ``scanned``; ``rows`` are like what each trip adds to its outputs."""

    def trip(inner: Recorder, state: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        return _body_values(walk, inner, body, (*state, *slices), scope, frame)

    length = scanned[0].shape[0]
    stacked = [torch.empty((length, *row.shape), dtype=row.dtype, device="meta") for row in rows]
    return record_rows(walk.recorder, _tensors(states), scanned, stacked, trip)


def _turned(tensor: Tensor, is_backwards: int) -> Tensor:
    return tensor.flip(0) if is_backwards else tensor


def _per(attributes: Mapping[str, Any], name: str, count: int) -> Ints:
    values = attributes.get(name, (0,) * count)
    if len(values) != count:
        raise Refused(f"attribute '{name}' has {len(values)} values; expected {count}")
    return tuple(values)


CONTROL = {"If": branch, "Loop": loop, "Scan": scan}
"""The function that evaluates each operator with subgraphs."""
