"""Recipes: how a constant is computed from a model's weights, as an expression of ONNX operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, helper, numpy_helper

from nimblec.cpu.kernels import Header
from nimblert.cpu.onnx_session import open_session, ort_value


@dataclass(frozen=True, slots=True)
class Source:
    """A weight of the model, by its name there."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant that depends on no weight, as a serialized TensorProto."""

    tensor: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """An output of an operator. ``node`` is a serialized NodeProto without names; an input may be left out."""

    node: bytes
    inputs: "tuple[WeightExpression | None, ...]"
    output: int = 0
    output_count: int = 1
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Hash once: a recipe is a tree, and hashing its leaves again at each level would be quadratic."""
        object.__setattr__(self, "_hash", hash((self.node, self.inputs, self.output)))

    def __hash__(self) -> int:
        return self._hash


WeightExpression: TypeAlias = Source | Fixed | Result


def fixed(array: np.ndarray) -> Fixed:
    """Return a constant of these elements."""
    return Fixed(numpy_helper.from_array(array).SerializeToString(deterministic=True))


def result(op_type: str, *inputs: WeightExpression, **attributes: Any) -> Result:
    """Return the output of an operator of ONNX itself that has one output."""
    node = helper.make_node(op_type, [], [], **attributes)
    return Result(node.SerializeToString(deterministic=True), inputs)


@cache
def sources(recipe: WeightExpression | None) -> frozenset[Source]:
    """Return the weights that a recipe depends on."""
    if isinstance(recipe, Source):
        return frozenset({recipe})
    if isinstance(recipe, Result):
        return frozenset().union(*map(sources, recipe.inputs))
    return frozenset()


def model_of(recipes: Mapping[str, WeightExpression], header: Header) -> ModelProto:
    """Return the model whose outputs are these recipes and whose inputs are their weights, both by name."""
    model = ModelProto(ir_version=header.ir_version, functions=header.functions)
    model.opset_import.extend(OperatorSetIdProto(domain=d, version=v) for d, v in sorted(header.opsets.items()))
    model.graph.name = "recipe"
    writer = _Writer(model.graph, recipes)
    for name, recipe in recipes.items():
        value = writer.value(recipe)
        # Other names are weights themselves, or values of another output.
        if value != name:
            model.graph.node.add(op_type="Identity", name=name, input=[value], output=[name])
        model.graph.output.add(name=name)
    _copy_outputs_that_are_read(model.graph)
    return model


def _copy_outputs_that_are_read(graph: GraphProto) -> None:
    """Give the nodes of a graph other values to read than its outputs, which a refit writes to memory of the plan."""
    read = {value for node in graph.node for value in node.input}
    inner = {output.name: f"nimblec read {output.name}" for output in graph.output if output.name in read}
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [inner.get(value, value) for value in values]
    for name, value in inner.items():
        graph.node.add(op_type="Identity", name=value, input=[value], output=[name])


class _Writer:
    """Writes recipes as nodes, each once; those among ``outputs`` get their names."""

    def __init__(self, graph: GraphProto, outputs: Mapping[str, WeightExpression]) -> None:
        self._graph = graph
        self._names: dict[WeightExpression, str] = {}
        self._outputs: dict[WeightExpression, str] = {}
        for name, recipe in outputs.items():
            self._outputs.setdefault(recipe, name)

    def value(self, recipe: WeightExpression) -> str:
        """Return the name of a recipe's value."""
        if recipe not in self._names:
            match recipe:
                case Source():
                    self._names[recipe] = recipe.name
                    element_type = helper.np_dtype_to_tensor_dtype(np.dtype(recipe.dtype))
                    self._graph.input.append(helper.make_tensor_value_info(recipe.name, element_type, recipe.shape))
                case Fixed():
                    self._names[recipe] = self._new_name()
                    tensor = TensorProto.FromString(recipe.tensor)
                    tensor.name = self._names[recipe]
                    self._graph.initializer.append(tensor)
                case Result():
                    self._write(recipe)
        return self._names[recipe]

    def _new_name(self) -> str:
        return f"nimblec value {len(self._names)}"

    def _write(self, recipe: Result) -> None:
        inputs = ["" if read is None else self.value(read) for read in recipe.inputs]
        node = NodeProto.FromString(recipe.node)
        node.input.extend(inputs)
        for index in range(recipe.output_count):
            made = replace(recipe, output=index)
            self._names[made] = self._outputs[made] if made in self._outputs else self._new_name()
            node.output.append(self._names[made])
        node.name = node.output[0]
        self._graph.node.append(node)


def compute(recipes: Sequence[WeightExpression], arrays: Mapping[str, np.ndarray], header: Header) -> list[np.ndarray]:
    """Return the values of the recipes for these weights, by name. Raises ONNX Runtime's own errors."""
    if not recipes:
        return []
    model = model_of({f"output {i}": recipe for i, recipe in enumerate(recipes)}, header)
    session = open_session(model.SerializeToString())
    values = {value.name: arrays[value.name] for value in model.graph.input}
    dense = {name: np.require(array, requirements=["C", "A"]) for name, array in values.items()}
    given = {name: ort_value(array, array.dtype.name) for name, array in dense.items()}
    return [value.numpy() for value in session.run_with_ort_values(None, given)]


def settled(recipes: Mapping[str, WeightExpression], header: Header) -> dict[str, WeightExpression]:
    """Return the recipes with constants in place of all parts that depend on no weight, such as shapes."""
    parts: dict[WeightExpression, None] = {}
    for recipe in recipes.values():
        _collect(recipe, parts)
    made: dict[WeightExpression, WeightExpression] = dict(
        zip(parts, map(fixed, compute(list(parts), {}, header)), strict=True)
    )
    return {name: _replaced(recipe, made) for name, recipe in recipes.items()}


def _collect(recipe: WeightExpression, parts: dict[WeightExpression, None]) -> None:
    """Add the largest parts of a recipe that depend on no weight."""
    if isinstance(recipe, Result):
        if not sources(recipe):
            parts[recipe] = None
            return
        for read in recipe.inputs:
            if read is not None:
                _collect(read, parts)


def _replaced(recipe: WeightExpression, made: dict[WeightExpression, WeightExpression]) -> WeightExpression:
    if recipe not in made:
        made[recipe] = recipe
        if isinstance(recipe, Result):
            inputs = tuple(None if read is None else _replaced(read, made) for read in recipe.inputs)
            made[recipe] = replace(recipe, inputs=inputs)
    return made[recipe]
