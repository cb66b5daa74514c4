"""The parameters and buffers of a module in the ONNX program that torch.onnx.export made of it."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from nimblec.pytorch.tensors import as_array


def optimize_around_weights(program: Any) -> None:
    """Optimise an exported program with its parameters and buffers as inputs, so that none of them is folded."""
    graph, names = program.model.graph, program.exported_program.state_dict
    hidden = {name: graph.initializers.pop(name) for name in names if name in graph.initializers}
    contents = [value.const_value for value in hidden.values()]
    for value in hidden.values():
        value.const_value = None
        graph.inputs.append(value)
    program.optimize()
    for value in hidden.values():
        graph.inputs.remove(value)
    for value in graph.outputs:
        # The optimizer names an output after the weight that it equals.
        value.name = f"output of {value.name}"
    for (name, value), content in zip(hidden.items(), contents, strict=True):
        value.name, value.const_value = name, content
        graph.register_initializer(value)


def name_ends(program: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs of an optimised program; other values that are called so get other names.

    torch.onnx.export would do it before the optimizer, which renames an input that is an output, and where two outputs
    are one value; and it does not look for other values of these names.
    """
    graph = program.model.graph
    ends = [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]
    read = (value for node in graph.all_nodes() for value in (*node.inputs, *node.outputs) if value is not None)
    values = {id(value): value for value in (*graph.inputs, *graph.initializers.values(), *read)}
    given = {name for _, name in ends}
    taken = given | {value.name for value in values.values()}
    for value in values.values():
        if value.name in given:
            value.name = next(name for name in _names(value.name) if name not in taken)
            taken.add(value.name)
    for value, name in ends:
        value.name = name


def kept_weights(program: Any) -> Iterator[str]:
    """Yield the parameters and buffers that the exported file reads as often as the module, with the same bytes."""
    exported, initializers = program.exported_program, program.model.graph.initializers
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    readers = {names[node.name]: len(node.users) for node in exported.graph.nodes if node.name in names}
    for name, tensor in exported.state_dict.items():
        value = initializers.get(name)
        if value is None or len(value.uses()) != readers.get(name):
            continue
        if value.const_value.numpy().tobytes() == as_array(tensor).tobytes():
            yield name


def register_constants(program: Any) -> None:
    """Make all constants that nodes read initializers of the graph.

    Of several calls that clamp one value to constant tensors, onnxscript's optimizer registers the last one's bounds.
    """
    graph = program.model.graph
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() is not None or value.is_initializer():
                continue
            value.name = next(name for name in _names(value.name) if name not in graph.initializers)
            graph.register_initializer(value)


def _names(name: str) -> Iterator[str]:
    """Yield a name, and others that begin with it."""
    yield name
    yield from (f"{name}_{number}" for number in count(1))
