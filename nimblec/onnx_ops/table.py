"""The table of operators, filled by the decorator `op`.

The signature of a function says how a node is bound to it:

- positional parameters are the node's inputs in order, keyword-only ones its attributes, with the
  defaults of the ONNX schema; an attribute that has no parameter makes the node refused;
- an input is a `Tensor` (real or fake), or must be known at import: `Known` (a real tensor),
  `Ints`, `Floats`, ``int``, ``float``, ``bool`` (host values), or is only described: `Description`;
- ``X | None`` is an optional input or attribute, ``*xs: Tensor`` a variadic input;
- a parameter of type `Node` gets the node itself, and a keyword-only one of another dataclass the attributes that are
  its fields.
"""

import dataclasses
import inspect
import types
import typing
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

Known: TypeAlias = Annotated[Tensor, "known"]
Ints: TypeAlias = tuple[int, ...]
Floats: TypeAlias = tuple[float, ...]
Strings: TypeAlias = tuple[str, ...]

MICROSOFT = "com.microsoft"
LATEST_OPSET = 28
"""The newest opset of the default domain whose operators the table was written for."""


class Refused(Exception):  # noqa: N818 - it reads as a sentence where it is raised
    """A node that cannot be imported; the message says what was found and what was expected."""


class Declined(Exception):  # noqa: N818 - as above
    """A use of an operator that its function leaves to the operator's function body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The properties of a tensor that are known without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node that is imported: its operator, opset, and which of its outputs are used.

    ``bounds`` are the largest shapes of outputs whose sizes may depend on values, where the user or the model gives
    them.
    """

    op_type: str
    opset: int
    outputs: tuple[bool, ...]
    bounds: tuple[Ints | None, ...] = ()

    def wants(self, index: int) -> bool:
        """Return whether output ``index`` has a name."""
        return index < len(self.outputs) and self.outputs[index]

    def bound(self, index: int) -> Ints:
        """Return the largest shape of output ``index``; raise `Refused` where it is not known."""
        bound = self.bounds[index] if index < len(self.bounds) else None
        if bound is None:
            raise Refused(
                "the size of its output is computed while the model runs, and nothing bounds it: where it is an output "
                "of the model, give its largest shape, --bound NAME=SHAPE"
            )
        return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """An input or attribute of an operator: ``kind`` is the type of its annotation."""

    name: str
    kind: Any
    optional: bool
    default: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A row of the table: what ``name`` does from opset ``since`` up to the next row."""

    domain: str
    name: str
    since: int
    function: Callable[..., Any]
    inputs: tuple[Parameter, ...]
    variadic: Parameter | None
    attributes: dict[str, Parameter]
    node_parameter: str | None
    group: tuple[str, Any] | None = None
    """The parameter that gets several attributes as one record, and its class."""


_ROWS: dict[tuple[str, str], list[Operator]] = {}

Function = typing.TypeVar("Function", bound=Callable[..., Any])


def op(
    *names: str, since: int = 1, domain: str = "", inputs: int | None = None
) -> Callable[[Function], Function]:
    """Enter the decorated function into the table, for each of ``names``; with ``inputs``, only the first so many."""

    def enter(function: Function) -> Function:
        for name in names:
            rows = _ROWS.setdefault((domain, name), [])
            row = _operator(function, domain, name, since)
            rows.append(dataclasses.replace(row, inputs=row.inputs[:inputs]))
            rows.sort(key=lambda row: row.since)
        return function

    return enter


def find(domain: str, name: str, opset: int) -> Operator | None:
    """Return the row for an operator at an opset, None where the table lacks it."""
    rows = _ROWS.get((domain, name), [])
    index = bisect_right(rows, opset, key=lambda row: row.since)
    return rows[index - 1] if index else None


def operators() -> tuple[Operator, ...]:
    """Return every row, by domain, name and opset."""
    return tuple(row for key in sorted(_ROWS) for row in _ROWS[key])


def _operator(function: Callable[..., Any], domain: str, name: str, since: int) -> Operator:
    inputs: list[Parameter] = []
    attributes: dict[str, Parameter] = {}
    variadic = node_parameter = group = None
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        row = _parameter(parameter.name, hints[parameter.name], parameter.default)
        if row.kind is Node:
            node_parameter = parameter.name
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and dataclasses.is_dataclass(row.kind):
            group = parameter.name, row.kind
            kinds = typing.get_type_hints(row.kind, include_extras=True)
            for field in dataclasses.fields(row.kind):
                attributes[field.name] = _parameter(field.name, kinds[field.name], field.default)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            variadic = row
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            attributes[parameter.name] = row
        else:
            inputs.append(row)
    return Operator(
        domain=domain,
        name=name,
        since=since,
        function=function,
        inputs=tuple(inputs),
        variadic=variadic,
        attributes=attributes,
        node_parameter=node_parameter,
        group=group,
    )


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    """Return a parameter with the type of its annotation; None is its default where it has none."""
    is_optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if is_optional:
        hint = next(member for member in typing.get_args(hint) if member is not types.NoneType)
    if default is inspect.Parameter.empty:
        return Parameter(name=name, kind=hint, optional=is_optional)
    return Parameter(name=name, kind=hint, optional=True, default=default)
