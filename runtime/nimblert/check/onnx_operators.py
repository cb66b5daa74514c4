"""The operators that a node of a CPU plan may call, with their inputs, outputs and attributes."""

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from nimblert._generated.onnx_operators import OPERATORS, OPSETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Formal:
    """An input or output of an operator; bit n of ``types`` is ONNX's element type n.

    ``optional``: it may be omitted. ``variadic``: it is the last one, and may be repeated.
    """

    optional: bool
    variadic: bool
    types: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One version of an operator.

    ``attributes`` holds for each name the number of its type (AttributeProto.AttributeType) and
    whether it must be there.
    """

    least_inputs: int
    inputs: tuple[Formal, ...]
    least_outputs: int
    outputs: tuple[Formal, ...]
    attributes: MappingProxyType[str, tuple[int, bool]]


@cache
def find(domain: str, name: str, opset: int) -> Operator | None:
    """Return the operator in version ``opset`` of its domain; None where plans may not call it."""
    found = None
    for line in OPERATORS.get(f"{domain}:{name}", "").splitlines():
        since, rest = line.split("/", 1)
        if int(since) <= opset:
            found = rest
    return _parsed(found) if found is not None and opset <= OPSETS[domain] else None


def _parsed(line: str) -> Operator:
    least_inputs, inputs, least_outputs, outputs, attributes = line.split("/")
    types = (attribute.split("=") for attribute in attributes.split())
    return Operator(
        least_inputs=int(least_inputs),
        inputs=_formals(inputs),
        least_outputs=int(least_outputs),
        outputs=_formals(outputs),
        attributes=MappingProxyType({name: (int(t.removesuffix("!")), t.endswith("!")) for name, t in types}),
    )


def _formals(text: str) -> tuple[Formal, ...]:
    return tuple(
        Formal(optional=formal[0] == "?", variadic=formal[0] == "*", types=int(formal[1:], 16))
        for formal in text.split()
    )
