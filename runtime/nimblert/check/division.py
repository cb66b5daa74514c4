"""Divisions that end the process: of the least int32 or int64 by -1, which the processor answers with SIGFPE.

ONNX Runtime's Div divides so in all versions, its Mod up to some version after 1.24. The operands of a kernel's only
node are compared before each run (`operands`, `check`), unless a constant excludes the case. Nothing can be compared
between the nodes of a kernel, nor in the body of a loop or branch, so a division of integers there needs such a
constant (`problems`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from nimblert.check.onnx_model import Graph, Node, TensorValue, Value
from nimblert.plan import Parameter

Operand: TypeAlias = Parameter | np.ndarray
"""An operand that is bound, or one that is a constant of the model."""


class _Known(NamedTuple):
    """Whether a value may hold the least int32 or int64, and -1 of these dtypes."""

    least: bool
    minus_one: bool


_INTEGER, _OTHER = _Known(least=True, minus_one=True), _Known(least=False, minus_one=False)
"""What is known by the dtype alone."""

_OPERATORS = frozenset({"Div", "Mod"})
_DTYPES: Mapping[int, np.dtype] = {6: np.dtype("<i4"), 7: np.dtype("<i8")}
"""The dtypes of these divisions, by TensorProto.DataType."""

_ENDS_PROCESS = "where the least one by -1 would end the process: expected a constant divisor other than -1, or floats"

_INTEGERS = frozenset({"ArgMax", "ArgMin", "NonZero", "SequenceLength", "Shape", "Size", "TopK", "Unique"})
_ELEMENTS = frozenset({"ConcatFromSequence", "OptionalGetElement", "SequenceAt"})
"""The operators for bodies whose output may be int32 or int64 although no input is."""


def operands(graph: Graph, parameters: Sequence[Parameter]) -> tuple[Operand, Operand] | None:
    """Return dividend and divisor of a kernel's only node if some of their values end the process, else None."""
    node, *others = graph.node
    if others or not _divides(node):
        return None
    bound = {parameter.name: parameter for parameter in parameters}
    known = {tensor.name or "": _of_constant(tensor) for tensor in graph.initializer if tensor.name not in bound}
    known |= {name: _INTEGER if p.dtype in {"int32", "int64"} else _OTHER for name, p in bound.items()}
    if _is_safe(node, known):
        return None
    constants = {tensor.name: tensor for tensor in graph.initializer}
    dividend, divisor = (bound[name] if name in bound else _numbers(constants[name]) for name in node.input)
    return dividend, divisor


def check(dividend: np.ndarray, divisor: np.ndarray) -> None:
    """Raise ValueError where an element of the dividend is the least of its dtype and is divided by -1."""
    least, is_negated = np.iinfo(dividend.dtype).min, divisor == -1
    if is_negated.any() and ((dividend == least) & is_negated).any():
        raise ValueError(f"{least} is divided by -1, and the result does not fit {dividend.dtype}")


def problems(nodes: Sequence[Node], constants: Sequence[TensorValue], types: Mapping[str, int | None]) -> Iterator[str]:
    """Yield a sentence for each division that may end the process, and whose operands cannot be compared before a run.

    Such are those in bodies, and those of a kernel of several ``nodes``. ``constants`` are those of the model, and
    ``types`` the element types of all values that the nodes may read. All other rules of the model must hold.
    """
    known = {name: _of_type(found) for name, found in types.items() if found is not None}
    known |= {tensor.name or "": _of_constant(tensor) for tensor in constants}
    for node in nodes:
        yield from _in_bodies(node, known.copy()) if _bodies(node) else ()
        if len(nodes) > 1 and _divides(node) and not _is_safe(node, known):
            yield f"{node.op_type}: divides integers in a model of several nodes, {_ENDS_PROCESS}"


def _in_bodies(node: Node, known: dict[str, _Known]) -> Iterator[str]:
    """Yield `problems` of a node's bodies, given what is known of the values around them."""
    for body in _bodies(node):
        known |= {value.name or "": _declared(value) for value in body.input}
        known |= {tensor.name or "": _of_constant(tensor) for tensor in body.initializer}
        for inner in body.node:
            yield from _in_bodies(inner, known)
            if _divides(inner) and not _is_safe(inner, known):
                yield f"{inner.op_type}: divides integers in the body of a loop or branch, {_ENDS_PROCESS}"
            known |= _outputs(inner, known)


def _outputs(node: Node, known: Mapping[str, _Known]) -> dict[str, _Known]:
    """Return what is known of the outputs of a node in a body."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if bodies := _bodies(node):
        # ONNX Runtime compares the types that bodies declare; the first output of a loop's body is its condition.
        returned = [body.output[node.op_type == "Loop" :] for body in bodies]
        declared = (
            _INTEGER if _INTEGER in map(_declared, values) else _OTHER for values in zip(*returned, strict=False)
        )
        return {**dict.fromkeys(node.output, _INTEGER), **dict(zip(node.output, declared, strict=False))}
    if node.op_type == "Cast":
        found = _of_type(attributes["to"].i)
    elif node.op_type == "ConstantOfShape":
        value = attributes["value"].t if "value" in attributes else None
        found = _OTHER if value is None else _of_type(value.data_type)
    elif node.op_type in _INTEGERS | _ELEMENTS:
        found = _INTEGER
    else:
        typed_by = node.input[node.op_type == "Where" :][:1]
        found = _INTEGER if any(known.get(name, _INTEGER) != _OTHER for name in typed_by) else _OTHER
    return dict.fromkeys(node.output, found)


def _bodies(node: Node) -> list[Graph]:
    return [attribute.g for attribute in node.attribute if attribute.g is not None]


def _divides(node: Node) -> bool:
    return not node.domain and node.op_type in _OPERATORS and len(node.input) == 2


def _is_safe(node: Node, known: Mapping[str, _Known]) -> bool:
    dividend, divisor = (known.get(name, _INTEGER) for name in node.input)
    return not (dividend.least and divisor.minus_one)


def _of_type(element_type: int | None) -> _Known:
    return _INTEGER if element_type in _DTYPES else _OTHER


def _declared(value: Value) -> _Known:
    """Return what is known of an input or output of a body by its declared type."""
    tensor = value.type.tensor_type if value.type is not None else None
    return _INTEGER if tensor is None or tensor.elem_type is None else _of_type(tensor.elem_type)


def _of_constant(tensor: TensorValue) -> _Known:
    if tensor.data_type not in _DTYPES:
        return _OTHER
    numbers = _numbers(tensor)
    return _Known(least=bool((numbers == np.iinfo(numbers.dtype).min).any()), minus_one=bool((numbers == -1).any()))


def _numbers(tensor: TensorValue) -> np.ndarray:
    """Return the numbers of an int32 or int64 constant."""
    dtype = _DTYPES[tensor.data_type or 0]
    if tensor.raw_data is not None:
        return np.frombuffer(tensor.raw_data, dtype).reshape(tensor.dims)
    return np.array((*tensor.int32_data, *tensor.int64_data), dtype).reshape(tensor.dims)
