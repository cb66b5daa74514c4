"""Turn the inputs and attributes of a node into the arguments of its function."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.table import (
    Description,
    Floats,
    Ints,
    Known,
    Node,
    Operator,
    Parameter,
    Refused,
    Strings,
)

ATTRIBUTE_CHECKS = {
    int: lambda value: isinstance(value, int),
    float: lambda value: isinstance(value, float),
    str: lambda value: isinstance(value, str),
    Ints: lambda value: isinstance(value, tuple) and all(isinstance(item, int) for item in value),
    Floats: lambda value: isinstance(value, tuple) and all(isinstance(item, float) for item in value),
    Strings: lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
    Known: lambda value: isinstance(value, Tensor),
}


def call(operator: Operator, node: Node, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """Call the operator's function; raise `Refused` for inputs and attributes that do not fit it."""
    positional = _bind_inputs(operator, inputs)
    keywords = _bind_attributes(operator, attributes)
    if operator.node_parameter is not None:
        keywords[operator.node_parameter] = node
    if operator.group is not None:
        parameter, kind = operator.group
        keywords[parameter] = kind(**{field.name: keywords.pop(field.name) for field in fields(kind)})
    return operator.function(*positional, **keywords)


def _bind_inputs(operator: Operator, inputs: Sequence[Any]) -> list[Any]:
    declared = list(operator.inputs)
    extra = inputs[len(declared) :]
    if operator.variadic is None and any(value is not None for value in extra):
        raise Refused(f"has {len(inputs)} inputs; expected at most {len(declared)}")
    given = [*inputs[: len(declared)], *[None] * (len(declared) - len(inputs))]
    bound = [
        _bind_input(i, parameter, value)
        for i, (parameter, value) in enumerate(zip(declared, given, strict=True))
    ]
    if operator.variadic is not None:
        bound += [_bind_input(len(declared) + i, operator.variadic, value) for i, value in enumerate(extra)]
    return bound


def _bind_input(index: int, parameter: Parameter, value: Any) -> Any:
    where = f"input {index} '{parameter.name}'"
    if value is None:
        if parameter.optional:
            return parameter.default
        raise Refused(f"{where} is missing")
    if parameter.kind == list[Tensor]:
        if not isinstance(value, list):
            raise Refused(f"{where} is a tensor; expected a sequence")
        return value
    if parameter.kind is Any:
        return value
    if not isinstance(value, Tensor):
        raise Refused(f"{where} is a sequence; expected a tensor")
    if parameter.kind is Tensor:
        return value
    if parameter.kind is Description:
        return Description(dtype=value.dtype, shape=tuple(value.shape))
    if isinstance(value, FakeTensor):
        raise Refused(f"{where} is computed while the model runs; it must be known at import")
    return value if parameter.kind == Known else _host_value(where, parameter.kind, value)


def _host_value(where: str, kind: Any, value: Tensor) -> Any:
    if kind in (Ints, Floats):
        if value.dim() > 1:
            raise Refused(f"{where} has shape {tuple(value.shape)}; expected one dimension")
        return tuple(_number(where, int if kind == Ints else float, item) for item in value.reshape(-1).tolist())
    if value.numel() != 1:
        raise Refused(f"{where} has {value.numel()} elements; expected one")
    return _number(where, kind, value.item())


def _number(where: str, kind: type, value: float) -> float:
    if kind is int and not float(value).is_integer():
        raise Refused(f"{where} is {value}; expected an integer")
    if kind is bool:
        return bool(value)
    return int(value) if kind is int else float(value) if math.isfinite(value) else value


def _bind_attributes(operator: Operator, attributes: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(attributes.keys() - operator.attributes.keys())
    if unknown:
        raise Refused(f"attribute '{unknown[0]}' is not supported")
    return {
        name: _bind_attribute(parameter, attributes.get(name)) for name, parameter in operator.attributes.items()
    }


def _bind_attribute(parameter: Parameter, value: Any) -> Any:
    if value is None:
        if parameter.optional:
            return parameter.default
        raise Refused(f"attribute '{parameter.name}' is missing")
    if not ATTRIBUTE_CHECKS[parameter.kind](value):
        expected = getattr(parameter.kind, "__name__", str(parameter.kind))
        raise Refused(f"attribute '{parameter.name}' is {value!r:.60}; expected {expected}")
    return value
