"""The ONNX models of a CPU plan as frozen records: the part of `onnx.ModelProto` that plans may use.

Field numbers are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. All other fields are refused:
functions, sparse tensors, training, metadata, names of devices.
"""

# ruff: noqa: RUF009 - `one` and `many` make fields

from dataclasses import dataclass
from typing import Optional

from nimblert.check.protobuf import Budget, fields_by_tag, many, one, read, write

ELEMENT_TYPES = {
    "bool": 9,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "uint32": 12,
    "int32": 6,
    "uint64": 13,
    "int64": 7,
    "float16": 10,
    "bfloat16": 16,
    "float32": 1,
    "float64": 11,
    "complex64": 14,
    "complex128": 15,
}
"""ONNX's number (TensorProto.DataType) of each dtype of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key and its value, of external data."""

    key: str | None = one(1, "text")
    value: str | None = one(2, "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorValue:
    """A constant: ``data_type`` is ONNX's number; the data are in one of the other fields."""

    name: str | None = one(8, "text")
    data_type: int | None = one(2, "int32")
    dims: tuple[int, ...] = many(1, "int64")
    float_data: tuple[float, ...] = many(4, "float", packed=True)
    int32_data: tuple[int, ...] = many(5, "int32", packed=True)
    string_data: tuple[bytes, ...] = many(6, "bytes")
    int64_data: tuple[int, ...] = many(7, "int64", packed=True)
    raw_data: bytes | None = one(9, "bytes")
    double_data: tuple[float, ...] = many(10, "double", packed=True)
    uint64_data: tuple[int, ...] = many(11, "uint64", packed=True)
    external_data: tuple[Entry, ...] = many(13, Entry)
    data_location: int | None = one(14, "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A size, or the name of a dimension; neither where it is unknown."""

    dim_value: int | None = one(1, "int64")
    dim_param: str | None = one(2, "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a tensor."""

    dim: tuple[Dimension, ...] = many(1, Dimension)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type (ONNX's number) and shape; None where not declared."""

    elem_type: int | None = one(1, "int32")
    shape: Shape | None = one(2, Shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The element type of a sequence or an optional value."""

    elem_type: Optional["ValueType"] = one(1, "ValueType")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The type of a value: one of the three."""

    tensor_type: TensorType | None = one(1, TensorType)
    sequence_type: Wrapped | None = one(4, Wrapped)
    optional_type: Wrapped | None = one(9, Wrapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An input or output of a graph."""

    name: str | None = one(1, "text")
    type: ValueType | None = one(2, ValueType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """An attribute; ``type`` is ONNX's number, and tells which other field holds the value."""

    name: str | None = one(1, "text")
    f: float | None = one(2, "float")
    i: int | None = one(3, "int64")
    s: bytes | None = one(4, "bytes")
    t: TensorValue | None = one(5, TensorValue)
    g: Optional["Graph"] = one(6, "Graph")
    floats: tuple[float, ...] = many(7, "float")
    ints: tuple[int, ...] = many(8, "int64")
    strings: tuple[bytes, ...] = many(9, "bytes")
    type: int | None = one(20, "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an operator; the name "" stands for an omitted input or output."""

    input: tuple[str, ...] = many(1, "text")
    output: tuple[str, ...] = many(2, "text")
    name: str | None = one(3, "text")
    op_type: str | None = one(4, "text")
    attribute: tuple[Attribute, ...] = many(5, Attribute)
    domain: str | None = one(7, "text")
    overload: str | None = one(8, "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in topological order, constants, inputs, outputs, and the values between nodes."""

    node: tuple[Node, ...] = many(1, Node)
    name: str | None = one(2, "text")
    initializer: tuple[TensorValue, ...] = many(5, TensorValue)
    input: tuple[Value, ...] = many(11, Value)
    output: tuple[Value, ...] = many(12, Value)
    value_info: tuple[Value, ...] = many(13, Value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opset:
    """A set of operators and its version."""

    domain: str | None = one(1, "text")
    version: int | None = one(2, "int64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The code of a CPU kernel."""

    ir_version: int | None = one(1, "int64")
    graph: Graph | None = one(7, Graph)
    opset_import: tuple[Opset, ...] = many(8, Opset)


_FIELDS = fields_by_tag(
    Entry, TensorValue, Dimension, Shape, TensorType, Wrapped, ValueType, Value, Attribute, Node, Graph, Opset, Model
)


def read_model(code: bytes, budget: Budget) -> Model:
    """Read the model in ``code``; its fields count against ``budget``.

    Raises PlanFormatError where a plan may not hold it.
    """
    model = read(code, Model, _FIELDS, budget)
    assert isinstance(model, Model)
    return model


def write_model(model: Model) -> bytes:
    """Return the code of a model, which `read_model` reads."""
    return write(model, _FIELDS)
