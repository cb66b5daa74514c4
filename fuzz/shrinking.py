"""Make the model of a finding smaller while it stays a finding."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from fuzz import sessions
from fuzz.patterns.draft import read_names

MOST_OF_A_KIND = 12
"""Findings of one kind that are shrunk."""

Types = dict[str, Any]
"""The ValueInfoProto of each value that a node makes."""


def shrink(model: ModelProto, is_found: Callable[[bytes], bool]) -> ModelProto:
    """Return the smallest model that greedy removal of outputs, nodes and operands leaves."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(model, _types(model)):
            if is_found(candidate.SerializeToString()):
                model, smaller = candidate, True
                break
    return model


def _candidates(model: ModelProto, types: Types) -> Iterator[ModelProto]:
    """Yield smaller models: with one output, with a value in place of what computes it or is computed from it."""
    names = [output.name for output in model.graph.output]
    if len(names) > 1:
        yield from (_cut(model, {}, [output]) for output in model.graph.output)
        yield from (_cut(model, {}, [o for o in model.graph.output if o.name != name]) for name in names)
    for node in model.graph.node:
        known = [types[name] for name in node.output if name in types]
        if known and list(node.output) != names:
            yield _cut(model, {}, known[:1])  # it ends here
    for node in reversed(model.graph.node):
        for value in (types[name] for name in node.output if name in types and name not in names):
            yield _cut(model, {value.name: value}, list(model.graph.output))  # it begins here
        (first, made) = (next(iter(node.input), ""), next(iter(node.output), ""))
        if made not in names and first in types and made in types and _same(types[first], types[made]):
            yield _bypassed(model, made, first)


def _same(a: Any, b: Any) -> bool:
    return bool(a.type == b.type)


def _cut(model: ModelProto, new_inputs: Types, outputs: list[Any]) -> ModelProto:
    """Return the part of a model between new inputs and outputs."""
    kept = ModelProto()
    kept.CopyFrom(model)
    graph = kept.graph
    for name, value in new_inputs.items():
        graph.input.append(helper.make_value_info(f"x_{name}", value.type))
    renamed = {name: f"x_{name}" for name in new_inputs}
    nodes = [node for node in graph.node if not set(node.output) & set(new_inputs)]
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    return _rebuilt(kept, nodes, outputs)


def _bypassed(model: ModelProto, made: str, first: str) -> ModelProto:
    """Return a model that reads the first operand of a node in place of its result."""
    kept = ModelProto()
    kept.CopyFrom(model)
    for node in kept.graph.node:
        node.input[:] = [first if name == made else name for name in node.input]
    return _rebuilt(kept, list(kept.graph.node), list(kept.graph.output))


def _rebuilt(model: ModelProto, nodes: list[Any], outputs: list[Any]) -> ModelProto:
    """Return the model of those nodes that the outputs need."""
    needed = {output.name for output in outputs}
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            needed.update(read_names(node))
            kept.append(node)
    graph = helper.make_graph(
        kept[::-1],
        model.graph.name,
        [value for value in model.graph.input if value.name in needed],
        outputs,
        [tensor for tensor in model.graph.initializer if tensor.name in needed],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _types(model: ModelProto) -> Types:
    """Return the types of the values of the main graph, as a run finds them."""
    exposed = ModelProto()
    exposed.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del exposed.graph.output[:]
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names)
    types: Types = {value.name: value for value in model.graph.input}
    session = sessions.open_session(exposed, optimised=False)
    for inputs in sessions.draw_inputs(exposed):
        values = sessions.run(session, inputs)
        for name, value in zip(names, values or (), strict=False):
            if isinstance(value, np.ndarray):
                kind = helper.np_dtype_to_tensor_dtype(value.dtype)
                types[name] = helper.make_tensor_value_info(name, kind, value.shape)
    return types
