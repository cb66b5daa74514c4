"""One model for kernels that differ only in sizes, so that the programs of all sizes share a session.

ONNX Runtime packs its own copies of weights for each session. Sizes that differ between the kernels become symbolic
dimensions, and constants that differ become inputs. Each kernel has been checked with its own sizes, and its launches
bind tensors of these sizes: what ONNX Runtime computes, and the memory that it accesses, are the same.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nimblert.check.onnx_model import (
    ELEMENT_TYPES,
    Dimension,
    Graph,
    Model,
    Shape,
    TensorType,
    TensorValue,
    Value,
    ValueType,
    write_model,
)
from nimblert.check.onnx_rules import symbol
from nimblert.plan import Pointer

_NAMES = """
Add And Concat Equal Expand Gather GatherElements GatherND Greater GreaterOrEqual Less LessOrEqual Max Min Mul Not Or
Pow Reshape ScatterND Slice Sub Tile Where com.microsoft.SkipLayerNormalization
"""

_TAKES_INPUTS = frozenset(_NAMES.split())
"""Operators that compute the same, and as fast, from inputs as from constants: their kernels pack no weights."""

_DTYPES = {ELEMENT_TYPES[dtype]: np.dtype(dtype) for dtype in ("bool", "int32", "int64", "float32")}
"""The dtypes of constants within a model that may become inputs."""

Constants = Mapping[str, Pointer]
"""The places of the weights of a launch, by the name of the initializer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The code of a session, the constants that it takes as inputs, and the bytes that its largest node touches."""

    code: bytes
    inputs: frozenset[str] = frozenset()
    touched_nbytes: int = 0


def common(model: Model, weights: Constants) -> Hashable:
    """Return what a launch has in common with launches that differ only in sizes; None if there can be none."""
    graph = model.graph
    if graph is None or any(attribute.g is not None for node in graph.node for attribute in node.attribute):
        return None
    values = (tuple(map(_without_sizes, side)) for side in (graph.input, graph.output, graph.value_info))
    packed = {name for node in graph.node if symbol([node]) not in _TAKES_INPUTS for name in node.input}
    constants = frozenset(
        (t.name, t.data_type, len(t.dims), _content(t, weights) if _is_fixed(t, packed, weights) else None)
        for t in graph.initializer
    )
    return model.ir_version, model.opset_import, graph.node, *values, constants


def general(launches: Sequence[tuple[Model, Constants]]) -> Form:
    """Return the form of launches that have all in `common`, without ``touched_nbytes``."""
    graphs = [model.graph or Graph() for model, _ in launches]
    model, first = launches[0][0], graphs[0]
    tensors = [{tensor.name or "": tensor for tensor in graph.initializer} for graph in graphs]
    contents = {
        name: {_content(own[name], weights) for own, (_, weights) in zip(tensors, launches, strict=True)}
        for name in tensors[0]
    }
    inputs = frozenset(name for name, found in contents.items() if len(found) > 1)
    symbols: dict[tuple[int | None, ...], str] = {}

    def dimension(sizes: tuple[int | None, ...]) -> Dimension:
        if len(set(sizes)) == 1:
            return Dimension(dim_value=sizes[0])
        # Sizes that are equal in each launch have one name: ONNX Runtime computes in place where shapes are equal.
        return Dimension(dim_param=symbols.setdefault(sizes, f"d{len(symbols)}"))

    def without_sizes(values: Sequence[Value]) -> Value:
        found = _type(values[0])
        if found is None or found.shape is None:
            return values[0]
        sizes = zip(*(_sizes(value) for value in values), strict=True)
        return _value(values[0].name, found.elem_type, map(dimension, sizes))

    moved = (
        _value(name, tensor.data_type, map(dimension, zip(*(own[name].dims for own in tensors), strict=True)))
        for name, tensor in tensors[0].items()
        if name in inputs
    )
    graph = replace(
        first,
        initializer=tuple(tensor for tensor in first.initializer if tensor.name not in inputs),
        input=(*map(without_sizes, zip(*(graph.input for graph in graphs), strict=True)), *moved),
        output=tuple(map(without_sizes, zip(*(graph.output for graph in graphs), strict=True))),
        value_info=tuple(map(without_sizes, zip(*(graph.value_info for graph in graphs), strict=True))),
    )
    return Form(code=write_model(replace(model, graph=graph)), inputs=inputs)


def embedded_inputs(graph: Graph, form: Form) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and value of each input of a form that is a constant within the model of a launch."""
    for tensor in graph.initializer:
        if tensor.name in form.inputs and tensor.raw_data is not None and not tensor.data_location:
            yield tensor.name, np.frombuffer(tensor.raw_data, _DTYPES[tensor.data_type or 0]).reshape(tensor.dims)


def _is_fixed(tensor: TensorValue, packed: set[str], weights: Constants) -> bool:
    """Return whether launches that differ in a constant are of different forms."""
    is_movable = tensor.name in weights or (tensor.raw_data is not None and tensor.data_type in _DTYPES)
    return tensor.name in packed or not is_movable


def _content(tensor: TensorValue, weights: Constants) -> Hashable:
    """Return what tells the constants of two launches apart."""
    return weights.get(tensor.name or "", tensor.raw_data or replace(tensor, name=None)), tensor.dims


def _type(value: Value) -> TensorType | None:
    return None if value.type is None else value.type.tensor_type


def _sizes(value: Value) -> list[int | None]:
    found = _type(value)
    return [] if found is None or found.shape is None else [dimension.dim_value for dimension in found.shape.dim]


def _without_sizes(value: Value) -> Hashable:
    """Return a value's name, type and rank."""
    found = _type(value)
    if found is None or found.shape is None:
        return value
    return value.name, found.elem_type, len(found.shape.dim)


def _value(name: str | None, elem_type: int | None, sizes: Iterable[Dimension]) -> Value:
    return Value(name=name, type=ValueType(tensor_type=TensorType(elem_type=elem_type, shape=Shape(dim=tuple(sizes)))))
