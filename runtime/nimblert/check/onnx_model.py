"""The ONNX models of a CPU plan as frozen records: the part of `onnx.ModelProto` that plans may use.

Field numbers are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto. All other fields are refused:
functions, sparse tensors, training, metadata, names of devices.
"""

from dataclasses import dataclass
from typing import Optional

from nimblert.check.protobuf import Budget, Field, by_tag, read, write

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

    key: str | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorValue:
    """A constant: ``data_type`` is ONNX's number; the data are in one of the other fields."""

    name: str | None = None
    data_type: int | None = None
    dims: tuple[int, ...] = ()
    float_data: tuple[float, ...] = ()
    int32_data: tuple[int, ...] = ()
    string_data: tuple[bytes, ...] = ()
    int64_data: tuple[int, ...] = ()
    raw_data: bytes | None = None
    double_data: tuple[float, ...] = ()
    uint64_data: tuple[int, ...] = ()
    external_data: tuple[Entry, ...] = ()
    data_location: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A size, or the name of a dimension; neither where it is unknown."""

    dim_value: int | None = None
    dim_param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a tensor."""

    dim: tuple[Dimension, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Element type (ONNX's number) and shape; None where not declared."""

    elem_type: int | None = None
    shape: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The element type of a sequence or an optional value."""

    elem_type: Optional["ValueType"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """The type of a value: one of the three."""

    tensor_type: TensorType | None = None
    sequence_type: Wrapped | None = None
    optional_type: Wrapped | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An input or output of a graph."""

    name: str | None = None
    type: ValueType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """An attribute; ``type`` is ONNX's number, and tells which other field holds the value."""

    name: str | None = None
    f: float | None = None
    i: int | None = None
    s: bytes | None = None
    t: TensorValue | None = None
    g: Optional["Graph"] = None
    floats: tuple[float, ...] = ()
    ints: tuple[int, ...] = ()
    strings: tuple[bytes, ...] = ()
    type: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of an operator; the name "" stands for an omitted input or output."""

    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    name: str | None = None
    op_type: str | None = None
    attribute: tuple[Attribute, ...] = ()
    domain: str | None = None
    overload: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in topological order, constants, inputs, outputs, and the values between nodes."""

    node: tuple[Node, ...] = ()
    name: str | None = None
    initializer: tuple[TensorValue, ...] = ()
    input: tuple[Value, ...] = ()
    output: tuple[Value, ...] = ()
    value_info: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opset:
    """A set of operators and its version."""

    domain: str | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The code of a CPU kernel."""

    ir_version: int | None = None
    graph: Graph | None = None
    opset_import: tuple[Opset, ...] = ()


def _many(name: str, kind: object, *, packed: bool = False) -> Field:
    return Field(name=name, kind=kind, repeated=True, packed=packed)


def _one(name: str, kind: object) -> Field:
    return Field(name=name, kind=kind)


_NUMBERED = {
    Model: {1: _one("ir_version", "int64"), 7: _one("graph", Graph), 8: _many("opset_import", Opset)},
    Opset: {1: _one("domain", "text"), 2: _one("version", "int64")},
    Graph: {
        1: _many("node", Node),
        2: _one("name", "text"),
        5: _many("initializer", TensorValue),
        11: _many("input", Value),
        12: _many("output", Value),
        13: _many("value_info", Value),
    },
    Node: {
        1: _many("input", "text"),
        2: _many("output", "text"),
        3: _one("name", "text"),
        4: _one("op_type", "text"),
        5: _many("attribute", Attribute),
        7: _one("domain", "text"),
        8: _one("overload", "text"),
    },
    Attribute: {
        1: _one("name", "text"),
        2: _one("f", "float"),
        3: _one("i", "int64"),
        4: _one("s", "bytes"),
        5: _one("t", TensorValue),
        6: _one("g", Graph),
        7: _many("floats", "float"),
        8: _many("ints", "int64"),
        9: _many("strings", "bytes"),
        20: _one("type", "int32"),
    },
    TensorValue: {
        1: _many("dims", "int64"),
        2: _one("data_type", "int32"),
        4: _many("float_data", "float", packed=True),
        5: _many("int32_data", "int32", packed=True),
        6: _many("string_data", "bytes"),
        7: _many("int64_data", "int64", packed=True),
        8: _one("name", "text"),
        9: _one("raw_data", "bytes"),
        10: _many("double_data", "double", packed=True),
        11: _many("uint64_data", "uint64", packed=True),
        13: _many("external_data", Entry),
        14: _one("data_location", "int32"),
    },
    Entry: {1: _one("key", "text"), 2: _one("value", "text")},
    Value: {1: _one("name", "text"), 2: _one("type", ValueType)},
    ValueType: {
        1: _one("tensor_type", TensorType),
        4: _one("sequence_type", Wrapped),
        9: _one("optional_type", Wrapped),
    },
    Wrapped: {1: _one("elem_type", ValueType)},
    TensorType: {1: _one("elem_type", "int32"), 2: _one("shape", Shape)},
    Shape: {1: _many("dim", Dimension)},
    Dimension: {1: _one("dim_value", "int64"), 2: _one("dim_param", "text")},
}
_FIELDS = by_tag(_NUMBERED)


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
