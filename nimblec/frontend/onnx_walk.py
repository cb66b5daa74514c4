"""The walk over the nodes of an ONNX graph, its functions and its subgraphs."""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto
from torch import Tensor

from nimblec.errors import UnsupportedModelError
from nimblec.frontend import onnx_ops  # noqa: F401 - fills the table
from nimblec.frontend.onnx_control import CONTROL
from nimblec.frontend.onnx_file import describe
from nimblec.frontend.onnx_ops import binding
from nimblec.frontend.onnx_ops.creation import ELEMENT_TYPES
from nimblec.frontend.onnx_ops.table import LATEST_OPSET, Declined, Node, Operator, Refused, find
from nimblec.frontend.onnx_tensors import attribute_of, narrow_type
from nimblec.frontend.recorder import Recorder

Scope = MutableMapping[str, Any]
"""Values by name: a tensor (fake while it is not known), a list of tensors, or None."""

DEEPEST = 32
"""Functions and subgraphs may nest this deep; deeper is a cycle."""

MODEL_ERRORS = (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError, MemoryError)
"""What torch raises for shapes, dtypes and values that do not fit an operation."""


class _Failed:
    """The value of an output of a node that was refused."""


FAILED = _Failed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where the walk is: the opsets in force, the attributes of the function, how deep."""

    opsets: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    within: str = ""
    depth: int = 0


class Walk:
    """Evaluates nodes under a recorder; ``problems`` has a sentence for each node that was refused."""

    def __init__(self, model: ModelProto, recorder: Recorder) -> None:
        self.recorder = recorder
        self.problems: list[str] = []
        self.opsets = {_domain(entry.domain): entry.version for entry in model.opset_import}
        self.functions = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
        if self.opsets.get("", 1) > LATEST_OPSET:
            raise UnsupportedModelError(
                f"the model needs opset {self.opsets['']}; this version knows opsets up to {LATEST_OPSET}"
            )

    def nodes(self, nodes: Sequence[NodeProto], scope: Scope, frame: Frame) -> None:
        """Evaluate ``nodes`` in order, and put their outputs into ``scope``."""
        for proto in nodes:
            self.recorder.source = frame.within or describe(proto)
            try:
                _refuse_second_names(proto, scope)
                outputs = self._evaluate(proto, scope, frame)
            except (Refused, UnsupportedModelError, *MODEL_ERRORS) as exc:
                opset = frame.opsets.get(_domain(proto.domain), "?")
                inside = f" in {frame.within}" if frame.within else ""
                problem = f"{describe(proto)}{inside} (opset {opset}): {_sentence(exc)}"
                self.problems += [problem] if problem not in self.problems else []
                outputs = [FAILED] * len(proto.output)
            scope.update({name: value for name, value in zip(proto.output, outputs, strict=False) if name})

    def _evaluate(self, proto: NodeProto, scope: Scope, frame: Frame) -> Sequence[Any]:
        domain = _domain(proto.domain)
        if domain not in frame.opsets:
            raise Refused(f"the model imports no opset of domain '{proto.domain}'")
        function = self.functions.get((domain, proto.op_type, proto.overload))
        operator = find(domain, proto.op_type, frame.opsets[domain])
        control = CONTROL.get(proto.op_type) if domain == "" else None
        body = None if function or operator or control else _schema_function(domain, proto.op_type, frame)
        if not (function or operator or control or body):
            raise Refused("the operator is not supported")
        inputs = [_lookup(name, scope) for name in proto.input]
        if any(value is FAILED for value in inputs):
            return [FAILED] * len(proto.output)
        _check_dtypes(domain, proto, frame.opsets[domain], inputs)
        attributes = self._attributes(proto, frame)
        if function is not None:
            return self._call_function(function, proto, inputs, attributes, frame)
        if control is not None:
            return control(self, inputs, attributes, scope, frame)
        if operator is not None:
            with suppress(Declined):
                return _call_operator(operator, proto, inputs, attributes, frame.opsets[domain])
        schema = _schema_function(domain, proto.op_type, frame)
        if schema is None:
            raise Refused("its function declined, and it has no body")
        function = _schema_function_body(schema, proto, inputs, frame.opsets[domain])
        return self._call_function(function, proto, inputs, attributes, frame)

    def _attributes(self, proto: NodeProto, frame: Frame) -> dict[str, Any]:
        found = {}
        for attribute in proto.attribute:
            if attribute.ref_attr_name:
                value = frame.attributes.get(attribute.ref_attr_name)
            else:
                value = attribute_of(attribute)
            if value is not None:
                found[attribute.name] = value
        return found

    def _call_function(
        self,
        function: FunctionProto,
        proto: NodeProto,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        frame: Frame,
    ) -> Sequence[Any]:
        if frame.depth >= DEEPEST:
            raise Refused(f"functions nest more than {DEEPEST} deep")
        defaults = {attribute.name: attribute_of(attribute) for attribute in function.attribute_proto}
        inner = Frame(
            opsets={**frame.opsets, **{_domain(e.domain): e.version for e in function.opset_import}},
            attributes={**defaults, **attributes},
            within=frame.within or describe(proto),
            depth=frame.depth + 1,
        )
        padded = [*inputs, *[None] * (len(function.input) - len(inputs))]
        scope: Scope = dict(zip(function.input, padded, strict=False))
        self.nodes(function.node, scope, inner)
        wanted = zip(function.output, proto.output, strict=False)
        return [_lookup(name, scope) if output else None for name, output in wanted]


def _call_operator(
    operator: Operator, proto: NodeProto, inputs: Sequence[Any], attributes: Mapping[str, Any], opset: int
) -> Sequence[Any]:
    """Call a function of the table; every named output must come out of it."""
    outputs = tuple(bool(name) for name in proto.output)
    result = binding.call(operator, Node(op_type=proto.op_type, opset=opset, outputs=outputs), inputs, attributes)
    values = list(result) if isinstance(result, tuple) else [result]
    for i, name in enumerate(proto.output):
        if name and (i >= len(values) or values[i] is None):
            raise Refused(f"output {i} '{name}' is not supported")
    return values


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _refuse_second_names(proto: NodeProto, scope: Scope) -> None:
    """Refuse outputs whose names the same graph has given already."""
    local = scope.maps[0] if isinstance(scope, ChainMap) else scope
    for name in proto.output:
        if name and name in local:
            raise Refused(f"output '{name}' has the name of an earlier value")


def _lookup(name: str, scope: Scope) -> Any:
    if not name:
        return None
    try:
        return scope[name]
    except KeyError:
        raise Refused(f"input '{name}' is made by no node before it") from None


def _sentence(exc: BaseException) -> str:
    """Return the first line of an error, which is what torch says about shapes and dtypes."""
    text = str(exc).strip()
    return text.splitlines()[0] if text else type(exc).__name__


@lru_cache(maxsize=4096)
def _schema(domain: str, name: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _schema_function(domain: str, name: str, frame: Frame) -> onnx.defs.OpSchema | None:
    schema = _schema(domain, name, frame.opsets[domain])
    if schema is not None and (schema.has_function or schema.has_context_dependent_function):
        return schema
    return None


def _schema_function_body(
    schema: onnx.defs.OpSchema, proto: NodeProto, inputs: Sequence[Any], opset: int
) -> FunctionProto:
    """Return the body that the ONNX schema gives an operator, for these inputs."""
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset] or schema.function_opset_versions
        return FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    versions = schema.context_dependent_function_opset_versions
    chosen = max([v for v in versions if v <= opset] or versions)
    types = [_type_proto(value).SerializeToString() for value in inputs]
    resolved = NodeProto()
    resolved.CopyFrom(proto)
    body = schema.get_context_dependent_function_with_opset_version(
        chosen, resolved.SerializeToString(), types
    )
    return FunctionProto.FromString(body)


def _type_proto(value: Any) -> onnx.TypeProto:
    if not isinstance(value, Tensor):
        return onnx.TypeProto()
    number = next(number for number, dtype in ELEMENT_TYPES.items() if dtype == value.dtype)
    return onnx.helper.make_tensor_type_proto(number, tuple(value.shape))


def _check_dtypes(domain: str, proto: NodeProto, opset: int, inputs: Sequence[Any]) -> None:
    """Refuse inputs of different dtypes where the schema wants one: torch would promote them."""
    for name, value in zip(proto.input, inputs, strict=True):
        narrow = narrow_type(value)
        if narrow and (domain, proto.op_type) != ("", "DequantizeLinear"):
            raise Refused(f"input '{name}' is {narrow}, which only DequantizeLinear may read")
    types: dict[str, tuple[str, Any]] = {}
    for i, (parameter, homogeneous) in enumerate(_typed_inputs(domain, proto.op_type, opset, len(inputs))):
        value = inputs[i]
        if not homogeneous or not isinstance(value, Tensor):
            continue
        name, dtype = types.setdefault(parameter, (proto.input[i], value.dtype))
        if dtype != value.dtype:
            raise Refused(f"input '{proto.input[i]}' is {value.dtype}; expected {dtype}, as '{name}'")


@lru_cache(maxsize=4096)
def _typed_inputs(domain: str, name: str, opset: int, count: int) -> tuple[tuple[str, bool], ...]:
    schema = _schema(domain, name, opset)
    if schema is None or not schema.inputs:
        return ()
    formal = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(count)]
    return tuple((parameter.type_str, parameter.is_homogeneous) for parameter in formal)
