"""Take the branches of an ONNX model that are known before it runs, so that no `If` is left of them.

ONNX Runtime infers types in both branches, of which the one that is not taken need not fit the model's sizes, and
removes an `If` only after that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from nimblec.base.errors import UnsupportedModelError
from nimblec.cpu import optimizer
from nimblec.onnx_import import model_nodes


def take_branches(model: ModelProto, folder: Path) -> None:
    """Replace each `If` of the main graph whose condition follows from constants and static shapes by its branch.

    A branch may have others, and its shapes may determine more conditions. ``folder`` has the model's external data.
    """
    while conditions := _known_conditions(model, folder):
        _replace(model.graph, conditions)


def _bodies(node: NodeProto) -> dict[str, GraphProto]:
    """Return the graphs of a node's attributes by name; an empty one for an attribute that is none."""
    return {attribute.name: attribute.g for attribute in node.attribute}


def is_branching(node: NodeProto) -> bool:
    """Return whether a node is an `If`, and not one of a damaged file, which ONNX Runtime refuses."""
    if model_nodes.operator_name(node) != "If" or not node.input:
        return False
    bodies = _bodies(node)
    return bodies.keys() == {"then_branch", "else_branch"} and all(
        len(body.output) == len(node.output) for body in bodies.values()
    )


def _known_conditions(model: ModelProto, folder: Path) -> dict[str, bool]:
    """Return the conditions that ONNX Runtime's optimiser makes constants, from the nodes before them alone."""
    graph = model.graph
    conditions = dict.fromkeys(node.input[0] for node in graph.node if is_branching(node))
    if not conditions:
        return {}
    makers = {name: node for node in graph.node for name in node.output if name}
    given = {value.name for value in graph.input} - set(_constants(graph))
    needed = {name: made for name in conditions if (made := _before(name, makers, given)) is not None}
    if not needed:
        return {}
    used = set().union(*needed.values())
    part = part_of(model, [node for node in graph.node if not used.isdisjoint(node.output)], list(needed))
    model_nodes.clear_repeated_names(part)
    try:
        found = optimizer.folded(part, folder, needed)
    except UnsupportedModelError:
        # The whole model is refused later, for the same reason.
        return {}
    return {name: bool(array.any()) for name, array in found.items() if array.size == 1}


def _constants(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the initializers of a graph."""
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)


def _before(condition: str, makers: Mapping[str, NodeProto], given: set[str]) -> set[str] | None:
    """Return the computed values that a condition needs; None if these include an input or a node with bodies."""
    found: set[str] = set()
    # The bool says whether the value matters, or only the shape.
    waiting = [(condition, True)]
    seen = set(waiting)
    while waiting:
        name, by_value = waiting.pop()
        node = makers.get(name)
        if node is None:
            if by_value and name in given:
                return None
            continue
        if model_nodes.subgraphs(node):
            return None
        found.add(name)
        by_value = by_value and node.op_type not in optimizer.SHAPE_ARITHMETIC
        more = {(read, by_value) for read in node.input if read} - seen
        seen |= more
        waiting += more
    return found


def part_of(model: ModelProto, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> ModelProto:
    """Return the model with these nodes and outputs alone, and the inputs and constants that the nodes read."""
    graph = model.graph
    read = {name for node in nodes for name in model_nodes.read_names(node)} | set(outputs)
    return ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=GraphProto(
            name=graph.name,
            node=nodes,
            input=[value for value in graph.input if value.name in read],
            output=[ValueInfoProto(name=name) for name in outputs],
            initializer=[tensor for tensor in graph.initializer if tensor.name in read],
            sparse_initializer=[sparse for sparse in graph.sparse_initializer if sparse.values.name in read],
        ),
    )


def _replace(graph: GraphProto, conditions: Mapping[str, bool]) -> None:
    """Put the branch that is taken in the place of every `If` with one of these conditions."""
    names = Counter(_definitions(graph))
    nodes: list[NodeProto] = []
    for node in graph.node:
        if is_branching(node) and node.input[0] in conditions:
            for body in model_nodes.subgraphs(node):
                names.subtract(_definitions(body))
            branch = _bodies(node)["then_branch" if conditions[node.input[0]] else "else_branch"]
            nodes += _lifted(branch, node.output, names)
            graph.initializer.extend(branch.initializer)
            graph.sparse_initializer.extend(branch.sparse_initializer)
            names.update(_definitions(branch))
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _definitions(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values in a graph and in the bodies of its nodes."""
    yield from (value.name for value in graph.input)
    yield from _constants(graph)
    for node in graph.node:
        yield from filter(None, node.output)
        for body in model_nodes.subgraphs(node):
            yield from _definitions(body)


def _lifted(branch: GraphProto, outputs: Sequence[str], taken: Mapping[str, int]) -> list[NodeProto]:
    """Return the nodes of a branch, which make ``outputs``; rename its other values where their names are ``taken``."""
    own = [name for node in branch.node for name in node.output if name]
    made = {value.name: name for value, name in zip(branch.output, outputs, strict=True) if name}
    new = {name: made[name] for name in own if name in made}
    used = {*own, *_constants(branch)}
    for name in (*own, *_constants(branch)):
        if taken.get(name) and name not in new:
            new[name] = next(other for i in count(1) if not taken.get(other := f"{name}_{i}") and other not in used)
    for tensor in (*branch.initializer, *(sparse.values for sparse in branch.sparse_initializer)):
        tensor.name = new.get(tensor.name, tensor.name)
    for node in branch.node:
        node.output[:] = [new.get(name, name) for name in node.output]
        _rename_reads(node, new)
    copies = [
        helper.make_node("Identity", [new.get(value.name, value.name)], [name])
        for value, name in zip(branch.output, outputs, strict=True)
        if name and new.get(value.name) != name
    ]
    return [*branch.node, *copies]


def _rename_reads(node: NodeProto, new: Mapping[str, str]) -> None:
    node.input[:] = [new.get(name, name) for name in node.input]
    for body in model_nodes.subgraphs(node):
        for value in body.output:
            value.name = new.get(value.name, value.name)
        for inner in body.node:
            _rename_reads(inner, new)
