"""Loops and branches: their bodies as models of their own, which become programs that the plan's commands run.

A body reads inputs and its own constants, nothing of the graph around it. Its results lie in *slots*, memory outside of
the body: a loop's carried values, a branch's results. As with a model's state, a slot is an input of the body with the
value before and an output with the value after, so `place_state` decides what is written in place.

ONNX's Loop and Scan become one kind of loop, "while a bool is true". Counter, bool and stacked outputs are carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu.constants import TensorType
from nimblec.cpu.kernels import free_names, value_info
from nimblec.cpu.optimizer import OptimizedModel
from nimblec.onnx_import import model_nodes

CONTROL = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Memory in which a body hands a value on: ``input`` is the value before a run, ``output`` the one after it.

    ``is_read``: whether the body may read its input, as a loop's does and a branch's does not.
    """

    input: str
    output: str
    type: TensorType
    is_read: bool = True

    @property
    def name(self) -> str:
        """The name for messages."""
        return self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body as a model, whose inputs are its slots and the values ``captured`` of the graph around it."""

    model: OptimizedModel
    slots: tuple[Slot, ...]
    captured: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A value that a loop carries: before its first trip it is the value ``first``, or zeros if that is empty.

    ``output`` is the name of its last value around the loop, "" if nothing uses it.
    """

    first: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop while the bool in its first slot is true, at most ``limit`` trips.

    ``before`` are nodes that compute the first bool, of shape ``start_shape``. ``carried`` has an entry for each slot
    of the body. ``constants`` holds the constants that ``before`` and ``carried`` name.
    """

    body: Body
    carried: tuple[Carried, ...]
    limit: int
    before: tuple[NodeProto, ...]
    start_shape: tuple[int, ...]
    constants: Mapping[str, np.ndarray]


BOOL, COUNT = TensorType(dtype="bool", shape=()), TensorType(dtype="int64", shape=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The graph around a control-flow node: its model, and the types of all its values."""

    model: OptimizedModel
    types: Mapping[str, TensorType]

    def body(self, graph: GraphProto, slots: Sequence[Slot]) -> Body:
        """Return a body with these slots."""
        outer = {tensor.name: tensor for tensor in self.model.proto.graph.initializer}
        given = {slot.input for slot in slots}
        names = [name for name in dict.fromkeys(free_names(graph)) if name not in given]
        model = ModelProto()
        model.CopyFrom(self.model.proto)
        model.ClearField("graph")
        model.graph.name = "body"
        model.graph.node.extend(graph.node)
        model.graph.initializer.extend((*graph.initializer, *(outer[name] for name in names if name in outer)))
        read = tuple(name for name in names if name not in outer)
        model.graph.input.extend(value_info(slot.input, slot.type) for slot in slots)
        model.graph.input.extend(value_info(name, self.types[name]) for name in read)
        model.graph.output.extend(value_info(slot.output, slot.type) for slot in slots)
        own = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        arrays = {name: self.model.arrays[name] for name in names if name in self.model.arrays} | own
        closed = OptimizedModel(proto=model, arrays=arrays, folder=self.model.folder)
        return Body(model=closed, slots=tuple(slots), captured=read)


def branches(node: NodeProto, scope: Scope) -> tuple[Body, Body]:
    """Return the bodies of an `If`, for false and for true."""
    graphs = {attribute.name: attribute.g for attribute in node.attribute}
    bodies = []
    for graph in (graphs["else_branch"], graphs["then_branch"]):
        named = zip(node.output, graph.output, strict=False)
        slots = [
            Slot(input=f"{name}/slot", output=value.name, type=scope.types[name], is_read=False)
            for name, value in named
            if name
        ]
        bodies.append(scope.body(graph, slots))
    return bodies[0], bodies[1]


def loop(node: NodeProto, scope: Scope, trip_limit: int) -> Loop:
    """Return a `Loop` or a `Scan` of ONNX as a loop while a bool is true.

    ``trip_limit`` is that of a loop whose number of trips is not a constant.
    """
    name = model_nodes.first_output(node)
    made = _Parts(name=name)
    made.graph.CopyFrom(model_nodes.subgraphs(node)[0])
    if node.op_type == "Scan":
        trips, start, firsts = _read_rows(made, node, scope)
    else:
        trips, start, *firsts = node.input
    known = scope.model.arrays.get(trips) if trips not in made.constants else made.constants[trips]
    counter, going = made.graph.input[0].name, made.graph.output[0].name
    zero, one, true = made.constant("zero", 0), made.constant("one", 1), made.constant("true", True)
    start = start or true
    made.graph.node.append(helper.make_node("Add", [counter, one], [f"{name}/next"]))
    if trips:
        made.before.append(helper.make_node("Less", [zero, trips], [f"{name}/any"]))
        made.graph.node.append(helper.make_node("Less", [f"{name}/next", trips], [f"{name}/more"]))
        made.graph.node.append(helper.make_node("And", [going, f"{name}/more"], [f"{name}/goes on"]))
        going = f"{name}/goes on"
    made.before.append(helper.make_node("And", [start, f"{name}/any" if trips else true], [f"{name}/start"]))
    made.carry(made.graph.input[1].name, going, f"{name}/start", "", BOOL)
    made.carry(counter, f"{name}/next", zero, "", COUNT)
    results = [value.name for value in made.graph.output[1:]]
    for value, after, first, output in zip(made.graph.input[2:], results, firsts, node.output, strict=False):
        made.carry(value.name, after, first, output, scope.types[first])
    for row, output in zip(results[len(firsts) :], node.output[len(firsts) :], strict=False):
        if output:
            made.stack(counter, row, output, scope.types[output])
    made.graph.initializer.extend(numpy_helper.from_array(array, of) for of, array in made.constants.items())
    return Loop(
        body=scope.body(made.graph, made.slots),
        carried=tuple(made.carried),
        limit=trip_limit if known is None else max(0, int(known.reshape(()))),
        before=tuple(made.before),
        start_shape=max((scope.types[v].shape for v in (trips, start) if v in scope.types), key=len, default=()),
        constants=made.constants,
    )


@dataclass(slots=True, kw_only=True)
class _Parts:
    """A loop under construction. Names of what is added begin with that of the node's first output."""

    name: str
    graph: GraphProto = field(default_factory=GraphProto)
    before: list[NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)

    def constant(self, what: str, value: object) -> str:
        """Add a constant, an int64 or a bool, and return its name."""
        name = f"{self.name}/{what}"
        self.constants[name] = np.array(value)
        return name

    def carry(self, before: str, after: str, first: str, output: str, of: TensorType) -> None:
        """Carry a value."""
        self.slots.append(Slot(input=before, output=after, type=of))
        self.carried.append(Carried(first=first, output=output))

    def stack(self, counter: str, row: str, output: str, of: TensorType) -> None:
        """Carry a value into which each trip writes one row."""
        place, rows = self.constant("place", [1, 1]), self.constant(f"{output}/rows", [1, *of.shape[1:]])
        stack = f"{output}/stack"
        self.graph.node.extend((
            helper.make_node("Reshape", [counter, place], [f"{stack}/place"]),
            helper.make_node("Reshape", [row, rows], [f"{stack}/row"]),
            helper.make_node("ScatterND", [stack, f"{stack}/place", f"{stack}/row"], [f"{stack}/next"]),
        ))  # fmt: skip
        self.carry(stack, f"{stack}/next", "", output, of)


def _read_rows(made: _Parts, node: NodeProto, scope: Scope) -> tuple[str, str, list[str]]:
    """Turn the body of a Scan into that of a Loop, in which each trip takes a row of each scanned input.

    Returns the number of trips, the condition at the start (none), and the first states.
    """
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if any(attributes.get("scan_output_axes", ())) or any(attributes.get("scan_output_directions", ())):
        raise UnsupportedModelError(
            f"node {model_nodes.node_name(node)!r} (Scan): stacks its outputs backwards, or along an inner axis"
        )
    if len(node.input) != len(made.graph.input):  # the first is sequence_lens, and all have a batch axis
        raise UnsupportedModelError(
            f"node {model_nodes.node_name(node)!r} (Scan): is of opset 8, expected opset 9 or later"
        )
    states = len(node.input) - attributes["num_scan_inputs"]
    scanned = node.input[states:]
    axes = attributes.get("scan_input_axes") or [0] * len(scanned)
    backwards = attributes.get("scan_input_directions") or [0] * len(scanned)
    trips = scope.types[scanned[0]].shape[axes[0]]
    old = GraphProto()
    old.CopyFrom(made.graph)
    counter, going = f"{made.name}/trip", f"{made.name}/going"
    reading = [helper.make_node("Sub", [made.constant("last", trips - 1), counter], [f"{made.name}/from the end"])]
    for row, source, axis, is_backwards in zip(old.input[states:], scanned, axes, backwards, strict=True):
        index = f"{made.name}/from the end" if is_backwards else counter
        reading.append(helper.make_node("Gather", [source, index], [row.name], axis=axis))
    for entries in (made.graph.node, made.graph.input, made.graph.output):
        del entries[:]
    made.graph.node.extend((*(reading if any(backwards) else reading[1:]), *old.node))
    made.graph.input.extend((value_info(counter, COUNT), value_info(going, BOOL), *old.input[:states]))
    made.graph.output.extend((value_info(going, BOOL), *old.output))
    return made.constant("trips", trips), "", list(node.input[:states])
