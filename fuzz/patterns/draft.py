"""A model under construction, with the draws that its patterns make."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference

Shape = tuple[int, ...]

TYPES: dict[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
    "int32": TensorProto.INT32,
    "uint32": TensorProto.UINT32,
    "int64": TensorProto.INT64,
    "uint64": TensorProto.UINT64,
    "bool": TensorProto.BOOL,
}
"""ONNX's number of each dtype that patterns use."""

DOMAINS = {"com.microsoft": 1, "ai.onnx.ml": 4}
"""Versions of the operator sets beside ONNX's own."""

_IR_VERSIONS = {11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}

_AXES_ARE_INPUTS = 13
"""The opset since which axes of Squeeze, Unsqueeze and ReduceSum, and sizes of Split, are inputs."""


def read_names(node: NodeProto) -> set[str]:
    """Return the names that a node reads, also in its bodies."""
    bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return set(node.input).union(*(read_names(inner) for body in bodies for inner in body.node))


class Draft:
    """Nodes, constants and inputs of a model, and the generator that patterns draw from.

    A pattern adds nodes through `node`, and takes its operand from `take`, so that patterns can follow one another.
    """

    def __init__(self, rng: Random, opset: int, boldness: float, prefix: str = "") -> None:
        """Take ``boldness``, the probability that `choose` departs from what an optimiser looks for.

        Names begin with the ``prefix``.
        """
        self.rng = rng
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, tuple[str, Shape]] = {}
        self._boldness = boldness
        self._array_rng = np.random.default_rng(rng.getrandbits(32))
        self._initializers: dict[str, TensorProto] = {}
        self._default_inputs: set[str] = set()
        self._types: dict[str, tuple[str, Shape]] = {}
        self._current: str | None = None
        self._prefix = prefix
        self._domains: set[str] = set()

    # draws

    def choose(self, usual: Any, *others: Any) -> Any:
        """Return ``usual``, or boldly one of ``others``; what a function returns in place of the function."""
        return self.any_of(*others) if self.rng.random() < self._boldness else self.any_of(usual)

    def any_of(self, *values: Any) -> Any:
        """Return one of ``values``, all equally likely; what a function returns in place of the function."""
        chosen = self.rng.choice(values)
        return chosen() if callable(chosen) else chosen

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.rng.random() < probability

    def boldly(self) -> bool:
        """Return True where a departure is drawn."""
        return self.rng.random() < self._boldness

    def shape(self, rank: int, sizes: Sequence[int] = (1, 2, 3, 4, 5, 8)) -> Shape:
        """Draw a shape of a rank."""
        return tuple(self.rng.choice(sizes) for _ in range(rank))

    def normal(self, shape: Shape, scale: float = 1.0) -> np.ndarray:
        """Draw normal numbers."""
        return np.asarray(self._array_rng.standard_normal(shape) * scale)

    def integers(self, low: int, high: int, shape: Shape) -> np.ndarray:
        """Draw integers from ``low`` up to and without ``high``."""
        return self._array_rng.integers(low, high, shape)

    # values

    def input(self, dtype: str, shape: Shape, kind: str = "x") -> str:
        """Add an input. ``kind`` bounds its values, see `fuzz.judging.draw_inputs`."""
        name = f"{kind}_{len(self.inputs)}"
        self.inputs[name] = self._types[name] = (dtype, tuple(shape))
        return name

    def constant(self, values: Any, dtype: str = "float32") -> str:
        """Add a constant, at times as a node, with a value that callers may replace, or as an input."""
        array = np.asarray(values).astype(dtype)
        drawn = self.rng.random()
        if drawn < 0.02 and array.dtype.kind == "f":
            return self.input(dtype, array.shape)
        name = self.fixed(array, dtype, as_node=drawn > 0.9)
        if drawn < 0.03 and name in self._initializers:
            self._default_inputs.add(name)
        return name

    def fixed(self, values: Any, dtype: str = "int64", *, as_node: bool = False) -> str:
        """Add a constant that is one in every case, such as a shape."""
        array = np.asarray(values).astype(dtype)
        return self.tensor(numpy_helper.from_array(array), (dtype, array.shape), as_node=as_node)

    def tensor(self, tensor: TensorProto, described: tuple[str, Shape] | None = None, *, as_node: bool = False) -> str:
        """Add a constant that is a tensor already."""
        tensor.name = name = f"{self._prefix}c{len(self._initializers) + len(self.nodes)}"
        if described:
            self._types[name] = described
        if as_node:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self._initializers[name] = tensor
        return name

    def weights(self, shape: Shape, dtype: str = "float32", scale: float = 1.0) -> str:
        """Add a constant of normal numbers."""
        return self.constant(self.normal(shape, scale), dtype)

    def scalar(self, value: float, dtype: str = "float32") -> str:
        """Add a constant of one element, of rank 0 for the most part."""
        return self.constant(np.full(self.choose((), (1,), (1, 1)), value), dtype)

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output, and return the output's name."""
        return self.node_of(operator, *inputs, domain=domain, count=1, **attributes)[0]

    def node_of(self, operator: str, *inputs: str, count: int, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node of several outputs. Attributes that are None are left out."""
        outputs = [f"{self._prefix}v{len(self.nodes)}_{i}" for i in range(count)]
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, domain=domain, **given))
        self._domains.update({domain} - {""})
        return outputs

    # forms that depend on the opset

    def reduce(self, operator: str, x: str, axes: Sequence[int], keepdims: int = 1, **attributes: Any) -> str:
        """Add a reduction, whose axes are an attribute or an input."""
        as_input = self.opset >= (_AXES_ARE_INPUTS if operator == "ReduceSum" else 18)
        if as_input:
            return self.node(operator, x, self.fixed(axes), keepdims=keepdims, **attributes)
        return self.node(operator, x, axes=list(axes), keepdims=keepdims)

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        """Add Unsqueeze."""
        return self._with_axes("Unsqueeze", x, axes)

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        """Add Squeeze."""
        return self._with_axes("Squeeze", x, axes)

    def _with_axes(self, operator: str, x: str, axes: Sequence[int]) -> str:
        if self.opset >= _AXES_ARE_INPUTS:
            return self.node(operator, x, self.fixed(axes))
        return self.node(operator, x, axes=list(axes))

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Add Split."""
        if self.opset >= _AXES_ARE_INPUTS:
            return self.node_of("Split", x, self.fixed(sizes), count=len(sizes), axis=axis)
        return self.node_of("Split", x, count=len(sizes), axis=axis, split=list(sizes))

    def swapped(self, operator: str, a: str, b: str) -> str:
        """Add a node of two inputs, at times in the other order."""
        return self.node(operator, *((b, a) if self.chance(0.15) else (a, b)))

    def cast(self, x: str, dtype: str) -> str:
        """Add a cast."""
        return self.typed(self.node("Cast", x, to=TYPES[dtype]), dtype, self.shape_of(x))

    # the operand that one pattern hands on to the next

    def take(self, dtype: str = "float32", *, rank: int | None = None, shape: Shape | None = None) -> str:
        """Return the result of the last pattern where it fits, else a new input.

        It fits with the ``dtype`` and the ``rank`` or ``shape`` that are given.
        """
        if self._current is not None and self.chance(0.8):
            found = self.find_type(self._current)
            is_alike = found and found[0] == dtype and shape in {None, found[1]} and rank in {None, len(found[1])}
            if is_alike:
                (taken, self._current) = (self._current, None)
                return taken
        x = self.input(dtype, self.shape(rank or self.any_of(1, 2, 2, 3, 4)) if shape is None else shape)
        if dtype in {"float32", "int64"} and self.chance(0.4):
            return self.typed(self.node(self.any_of("Neg", "Abs"), x), dtype, self.shape_of(x))
        return x

    def typed(self, value: str, dtype: str, shape: Shape) -> str:
        """Record the type of a value, which shape inference may not know, and return the value."""
        self._types[value] = (dtype, shape)
        return value

    def hand_on(self, value: str) -> None:
        """Let the next pattern take a value."""
        self._current = value

    def type_of(self, value: str) -> tuple[str, Shape]:
        """Return dtype and shape of a value. Raises ValueError if they are not known."""
        found = self.find_type(value)
        if found is None:
            raise ValueError(f"the shape of {value} is not known")
        return found

    def shape_of(self, value: str) -> Shape:
        """Return the shape of a value. Raises ValueError if it is not known."""
        return self.type_of(value)[1]

    def find_type(self, value: str) -> tuple[str, Shape] | None:
        """Return dtype and shape of a value; None if shape inference does not know them."""
        if value not in self._types:
            names = {number: name for name, number in TYPES.items()}
            inferred = shape_inference.infer_shapes(self.model([value]), data_prop=True)
            for known in (*inferred.graph.value_info, *inferred.graph.output):
                tensor = known.type.tensor_type
                sizes = [size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim]
                if tensor.HasField("shape") and None not in sizes and tensor.elem_type in names:
                    self._types[known.name] = (
                        names[tensor.elem_type],
                        tuple(size for size in sizes if size is not None),
                    )
        return self._types.get(value)

    # the result

    def dangling(self) -> list[str]:
        """Return the values that no node reads."""
        read = {name for node in self.nodes for name in read_names(node)}
        computed = (name for node in self.nodes if node.op_type != "Constant" for name in node.output)
        return [name for name in computed if name and name not in read]

    def model(self, outputs: Sequence[str]) -> ModelProto:
        """Return the model so far, with outputs of unknown type."""
        read = {name for node in self.nodes for name in read_names(node)}
        values = [
            helper.make_tensor_value_info(name, TYPES[dtype], shape)
            for name, (dtype, shape) in self.inputs.items()
            if name in read
        ]
        for name in sorted(self._default_inputs & read):
            tensor = self._initializers[name]
            values.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        returned = [ValueInfoProto(name=name) for name in outputs]
        constants = [tensor for name, tensor in self._initializers.items() if name in read]
        graph = helper.make_graph(self.nodes, "drawn", values, returned, constants)
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(domain, DOMAINS[domain]) for domain in sorted(self._domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSIONS[self.opset], producer_name="fuzz")
