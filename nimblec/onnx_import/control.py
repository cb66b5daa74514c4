"""If, Loop and Scan: branches are taken and loops unrolled at import."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from onnx import GraphProto, NodeProto
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_import.frame import Frame, Scope
from nimblec.onnx_import.tensors import tensor_of
from nimblec.onnx_ops.axes import axis_of, sizes_of
from nimblec.onnx_ops.creation import dtype_of
from nimblec.onnx_ops.table import Ints, Refused

MOST_NODES = 20_000
"""A loop may unroll to this many nodes."""


class Walk(Protocol):
    """Evaluates nodes; ``problems`` has a sentence for each node that was refused."""

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
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame
) -> list[Any]:
    """Evaluate the branch that the condition, known at import, takes."""
    chosen = attributes["then_branch" if _truth(inputs[0], "condition") else "else_branch"]
    return run_graph(walk, chosen, (), scope, frame)


def _truth(value: Any, what: str) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        raise Refused(f"its {what} is computed while the model runs; it must be known at import")
    return bool(value.reshape(-1)[0])


def loop(
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame
) -> list[Any]:
    """Unroll a loop whose trip count and conditions are known at import."""
    body: GraphProto = attributes["body"]
    given: list[Any] = [*inputs, *[None] * (2 - len(inputs))]
    trip, going, carried = given[0], given[1], given[2:]
    if isinstance(trip, FakeTensor):
        raise Refused("input 0 'M' is computed while the model runs; it must be known at import")
    most = MOST_NODES // max(1, len(body.node))
    limit = most + 1 if trip is None else int(trip.reshape(-1)[0])
    condition = torch.tensor(True) if going is None else going
    gathered: list[list[Any]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    step = 0
    while step < limit and _truth(condition, "condition"):
        if step >= most:
            raise Refused(f"unrolls to more than {MOST_NODES} nodes")
        condition, *values = run_graph(walk, body, (torch.tensor(step), condition, *carried), scope, frame)
        _stop_at_failures(walk, values)
        carried = values[: len(carried)]
        for kept, value in zip(gathered, values[len(carried) :], strict=True):
            kept.append(value)
        step += 1
    ends = body.output[1 + len(carried) :]
    return [*carried, *(_stacked(kept, value, 0) for kept, value in zip(gathered, ends, strict=True))]


def _stop_at_failures(walk: Walk, values: Sequence[Any]) -> None:
    if walk.problems and any(not isinstance(value, (Tensor, list)) and value is not None for value in values):
        raise Refused("its body cannot be imported")


def _stacked(values: Sequence[Tensor], declared: Any, axis: int) -> Tensor:
    if values:
        return torch.stack(list(values), axis)
    tensor = declared.type.tensor_type
    if not tensor.HasField("shape") or any(not dim.HasField("dim_value") for dim in tensor.shape.dim):
        raise Refused(f"never runs, and the shape of its output '{declared.name}' is not declared")
    shape = [dim.dim_value for dim in tensor.shape.dim]
    shape.insert(axis, 0)
    return torch.zeros(sizes_of(shape), dtype=dtype_of(tensor.elem_type))


def scan(
    walk: Walk, inputs: Sequence[Any], attributes: Mapping[str, Any], scope: Scope, frame: Frame
) -> list[Any]:
    """Unroll a scan over the slices of its inputs (opset 9 and up)."""
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
    if length * max(1, len(body.node)) > MOST_NODES:
        raise Refused(f"unrolls to {length * len(body.node)} nodes; expected at most {MOST_NODES}")
    gathered: list[list[Any]] = [[] for _ in range(outputs)]
    for step in range(length):
        slices = [
            tensor.select(axis, length - 1 - step if turned else step)
            for tensor, axis, turned in zip(scanned, axes, in_turns, strict=True)
        ]
        values = run_graph(walk, body, (*states, *slices), scope, frame)
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


def _per(attributes: Mapping[str, Any], name: str, count: int) -> Ints:
    values = attributes.get(name, (0,) * count)
    if len(values) != count:
        raise Refused(f"attribute '{name}' has {len(values)} values; expected {count}")
    return tuple(values)


CONTROL = {"If": branch, "Loop": loop, "Scan": scan}
"""The function that evaluates each operator with subgraphs."""
