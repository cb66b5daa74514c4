"""A node of an ONNX graph in a proof: its operands, its attributes, and the shapes of its results."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TypeProto, helper, numpy_helper, shape_inference
from onnx.external_data_helper import uses_external_data

from nimblec.onnx_import.model_nodes import first_output, operator_name, read_names, subgraphs
from nimblec.padding.rules import Propagation
from nimblec.padding.values import Number, Shape, Value, constant

_MOST_FOLDED = 1 << 21
"""Constants of more elements are not computed."""

_MOST_READ = 1024
"""Constants of more elements are no shapes."""


class UnknownUseError(Exception):
    """A use of an operator that no rule knows."""


class Scope:
    """The values of a graph and of the graphs around it, in a proof for the dimension ``name`` of a size."""

    def __init__(
        self, name: str, size: int, opsets: Mapping[str, int], ir_version: int, outer: "Scope | None" = None
    ) -> None:
        self.name = name
        self.size = size
        self.opsets = opsets
        self.ir_version = ir_version
        self.values: ChainMap[str, Value] = ChainMap({}, *(outer.values.maps if outer else ()))
        self.types: ChainMap[str, TypeProto] = ChainMap({}, *(outer.types.maps if outer else ()))

    def run(self, graph: GraphProto, entering: Mapping[str, tuple[Value, TypeProto]]) -> list[tuple[Value, TypeProto]]:
        """Interpret the nodes of a graph, given its inputs and constants; returns its outputs."""
        for name, (value, kind) in entering.items():
            self._set(name, value, kind)
        for node in graph.node:
            call = Call(node, self)
            for name, value, kind in zip(node.output, call.run(), call.types, strict=False):
                self._set(name, value, kind)
        return [(self.values[value.name], self.types[value.name]) for value in graph.output]

    def run_body(
        self, graph: GraphProto, entering: Sequence[tuple[Value, TypeProto]] = ()
    ) -> list[tuple[Value, TypeProto]]:
        """Interpret a graph within this one."""
        names = (value.name for value in graph.input)
        inner = Scope(self.name, self.size, self.opsets, self.ir_version, self)
        return inner.run(graph, {**dict(zip(names, entering, strict=True)), **constants_of(graph)})

    def _set(self, name: str, value: Value, kind: TypeProto) -> None:
        self.values[name] = value
        self.types[name] = kind


class Call:
    """A node with its operands.

    ``inputs`` has None for omitted ones, ``operands`` leaves them out. ``types`` are those of the results, without a
    shape where ONNX does not infer it.
    """

    def __init__(self, node: NodeProto, scope: Scope) -> None:
        self.node = node
        self.scope = scope
        self.kind = operator_name(node)
        self.inputs = [scope.values.get(name) if name else None for name in node.input]
        self.operands = [value for value in self.inputs if value is not None]
        self.opset = scope.opsets.get(node.domain, 1)
        self.attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.step = Propagation(f"{self.kind} {first_output(node)!r}", scope.name)
        self.types = self._inferred()

    def run(self) -> list[Value]:
        """Return the results."""
        rule, is_control = RULES.get(self.kind), bool(subgraphs(self.node))
        is_sized = bool(self.node.domain) or shape_of(self.types[0]) is not None
        if rule is None or not (is_control or (is_sized and all(value.is_sized for value in self.operands))):
            return self._unknown()
        if not is_control and (folded := self._folded()) is not None:
            return list(map(constant, folded))
        try:
            return rule(self)
        except (UnknownUseError, IndexError, KeyError):
            # Another opset may have the attribute or input elsewhere.
            return self._unknown()

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute's value; ``default`` where it is absent."""
        return self.attributes.get(name, default)

    @cached_property
    def shapes(self) -> list[Shape]:
        """The shapes of the results."""
        shapes = [shape_of(kind) for kind in self.types]
        if any(shape is None for shape in shapes):
            raise UnknownUseError
        return [shape for shape in shapes if shape is not None]

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        shape = shape_of(self.types[0])
        assert shape is not None
        return shape

    @property
    def rank(self) -> int:
        """The rank of the first operand."""
        return len(self.operands[0].shape)

    def axis(self, default: int) -> int:
        """Return the attribute that is an axis of the first operand."""
        axis: int = self.attribute("axis", default) % max(self.rank, 1)
        return axis

    def ints(self, name: str, index: int) -> list[int] | None:
        """Return integers that older opsets have in an attribute, and newer ones in an operand; None if omitted."""
        if name in self.attributes:
            return [int(number) for number in np.atleast_1d(self.attributes[name])]
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            return None
        if value.array is None:
            raise UnknownUseError
        return [int(number) for number in value.array.reshape(-1)]

    def axes(self) -> set[int]:
        """Return the axes of a reduction, by default all."""
        found = self.ints("axes", 1)
        if not found:
            return set() if self.attribute("noop_with_empty_axes", 0) else set(range(self.rank))
        return {axis % self.rank for axis in found}

    def evaluate(self, fills: Sequence[Number | None]) -> Number | None:
        """Return what the node makes of numbers; None where one of them is unknown, or the result is none."""
        names = [name for name in self.node.input if name]
        scalars = {n: np.array(f, self.dtype(n)) for n, f in zip(names, fills, strict=True) if f is not None}
        found = self._evaluated(scalars) if len(scalars) == len(set(names)) else None
        if found is None or found[0].size != 1 or found[0].dtype.kind not in "biuf" or np.isnan(found[0]).any():
            return None
        number: Number = found[0].reshape(()).item()
        return number

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a value."""
        found: np.dtype = helper.tensor_dtype_to_np_dtype(self.scope.types[name].tensor_type.elem_type)
        return found

    def _unknown(self) -> list[Value]:
        """Return results that may depend on all of the operands, and on whatever bodies read."""
        read = [self.scope.values[name] for name in read_names(self.node) if name in self.scope.values]
        return [self.step.unknown(read, shape_of(kind)) for kind in self.types]

    def _inferred(self) -> list[TypeProto]:
        node, names = self.node, self.node.input
        if self.kind in SHAPED_AS_FIRST:
            return [self.scope.types[names[0]]] * len(node.output)
        if subgraphs(node):
            return [TypeProto()] * len(node.output)
        arrays = {n: v.array for n, v in zip(names, self.inputs, strict=True) if v is not None and v.array is not None}
        try:
            found = shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, self.opset, node.domain),
                node,
                {name: self.scope.types[name] for name in names if name},
                {n: numpy_helper.from_array(array) for n, array in arrays.items() if array.size <= _MOST_READ},
                {},
                [helper.make_opsetid(domain, version) for domain, version in self.scope.opsets.items()],
                self.scope.ir_version,
            )
        except (onnx.defs.SchemaError, onnx.checker.ValidationError, shape_inference.InferenceError, KeyError):
            found = {}
        return [found.get(name, TypeProto()) if name else tensor_type(0, ()) for name in node.output]

    def _folded(self) -> list[np.ndarray] | None:
        """Return the results of a node that depend on known constants or on shapes alone."""
        if self.kind in {"Shape", "Size"}:
            return self._evaluated({self.node.input[0]: np.broadcast_to(np.int8(0), self.operands[0].shape)})
        arrays = {n: v.array for n, v in zip(self.node.input, self.inputs, strict=True) if v is not None}
        sizes = [_MOST_FOLDED + 1 if array is None else array.size for array in arrays.values()]
        sizes += [prod(shape_of(kind) or ()) for kind in self.types]
        return None if self.node.domain or max(sizes) > _MOST_FOLDED else self._evaluated(arrays)

    def _evaluated(self, arrays: Mapping[str, np.ndarray | None]) -> list[np.ndarray] | None:
        """Evaluate the node by ONNX's own implementation; return None where it fails."""
        # Importing the evaluator takes 30 ms.
        from onnx.reference import ReferenceEvaluator

        try:
            with np.errstate(all="ignore"):
                found = ReferenceEvaluator(self.node, opsets=dict(self.scope.opsets)).run(None, dict(arrays))
        except Exception:  # noqa: BLE001 - it raises anything
            return None
        return None if any(array is None for array in found) else [np.asarray(array) for array in found]


Rule: TypeAlias = Callable[[Call], list[Value]]
RULES: dict[str, Rule] = {}
"""By operator, with its domain; filled by the decorator `rule`."""

SHAPED_AS_FIRST = frozenset({
    "GroupNormalization", "MeanVarianceNormalization", "SimplifiedLayerNormalization", "ai.onnx.ml.Imputer",
    "ai.onnx.ml.Normalizer", "ai.onnx.ml.Scaler", "com.microsoft.BiasGelu", "com.microsoft.DequantizeLinear",
    "com.microsoft.FastGelu", "com.microsoft.Gelu", "com.microsoft.QuantizeLinear", "com.microsoft.QuickGelu",
    "com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization",
})  # fmt: skip
"""Operators whose results have the shape of the first operand, which ONNX does not infer."""


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Have operators interpreted by a function."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return add


def constants_of(graph: GraphProto) -> dict[str, tuple[Value, TypeProto]]:
    """Return the constants of a graph; of large ones, and of those in other files, only their types are read."""
    found = {}
    for tensor in graph.initializer:
        shape = tuple(tensor.dims)
        is_read = prod(shape) <= _MOST_FOLDED and not uses_external_data(tensor)
        value = constant(numpy_helper.to_array(tensor)) if is_read else Value(shape)
        found[tensor.name] = value, tensor_type(tensor.data_type, shape)
    return found


def tensor_type(element: int, shape: Shape) -> TypeProto:
    """Return the type of a tensor."""
    found: TypeProto = helper.make_tensor_type_proto(element, shape)
    return found


def shape_of(kind: TypeProto) -> Shape | None:
    """Return the static shape of a tensor; None where it is not known."""
    tensor = kind.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)
