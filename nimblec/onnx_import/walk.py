"""The walk over the nodes of an ONNX graph, its functions and its subgraphs."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto
from torch import Tensor

from nimblec import onnx_ops  # noqa: F401 - the first fills the table
from nimblec.base.errors import UnsupportedModelError, first_line
from nimblec.graph.recorder import Recorder
from nimblec.onnx_import import counted, schemas
from nimblec.onnx_import.control import CONTROL
from nimblec.onnx_import.frame import Frame, Scope
from nimblec.onnx_import.model_nodes import describe, plain_domain
from nimblec.onnx_import.tensors import attribute_of, narrow_type
from nimblec.onnx_ops import binding
from nimblec.onnx_ops.table import LATEST_OPSET, Declined, Ints, Node, Operator, Refused, find

DEEPEST = 32
"""Functions and subgraphs may nest this deep; deeper is a cycle."""

MODEL_ERRORS = (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError, MemoryError)
"""Errors of torch for shapes, dtypes and values that do not fit an operation."""


class _Failed:
    """The value of an output of a node that was refused."""


FAILED = _Failed()


class Walk:
    """Evaluates nodes under a recorder; ``problems`` has a sentence for each node that was refused.

    ``bounds`` are the largest shapes of outputs of the model.
    """

    def __init__(self, model: ModelProto, recorder: Recorder, bounds: Mapping[str, Ints]) -> None:
        self.recorder = recorder
        self.bounds = bounds
        self.problems: list[str] = []
        self.opsets = {plain_domain(entry.domain): entry.version for entry in model.opset_import}
        self.functions = {(plain_domain(f.domain), f.name, f.overload): f for f in model.functions}
        if self.opsets.get("", 1) > LATEST_OPSET:
            raise UnsupportedModelError(
                f"the model needs opset {self.opsets['']}; this version knows opsets up to {LATEST_OPSET}: export it "
                "for one of them"
            )

    def nodes(self, nodes: Sequence[NodeProto], scope: Scope, frame: Frame) -> None:
        """Evaluate ``nodes`` in order, and put their outputs into ``scope``."""
        for proto in nodes:
            self.recorder.source = frame.within or describe(proto)
            try:
                _refuse_second_names(proto, scope)
                outputs = self._evaluate(proto, scope, frame)
            except (Refused, UnsupportedModelError, *MODEL_ERRORS) as exc:
                opset = frame.opsets.get(plain_domain(proto.domain), "?")
                inside = f" in {frame.within}" if frame.within else ""
                problem = f"{describe(proto)}{inside} (opset {opset}): {first_line(exc) or type(exc).__name__}"
                self.problems += [problem] if problem not in self.problems else []
                outputs = [FAILED] * len(proto.output)
            scope.update({name: value for name, value in zip(proto.output, outputs, strict=False) if name})

    def _evaluate(self, proto: NodeProto, scope: Scope, frame: Frame) -> Sequence[Any]:
        domain = plain_domain(proto.domain)
        if domain not in frame.opsets:
            raise Refused(f"the model imports no opset of domain '{proto.domain}'")
        opset = frame.opsets[domain]
        function = self.functions.get((domain, proto.op_type, proto.overload))
        operator = find(domain, proto.op_type, opset)
        control = CONTROL.get(proto.op_type) if domain == "" else None
        body = None if function or operator or control else schemas.with_body(domain, proto.op_type, opset)
        if not (function or operator or control or body):
            raise Refused("the operator is not supported")
        inputs = [_lookup(name, scope) for name in proto.input]
        if any(value is FAILED for value in inputs):
            return [FAILED] * len(proto.output)
        values = [counted.values_of(value) for value in inputs]
        _check_dtypes(domain, proto, opset, values)
        attributes = self._attributes(proto, frame)
        if function is not None:
            return self._call_function(function, proto, inputs, attributes, frame)
        if control is not None:
            if proto.op_type != "If" and counted.is_counted(proto.op_type, inputs):
                raise Refused(counted.TAKES_NONE)
            return control(self, inputs, attributes, scope, frame, self._bounds_of(proto, frame))
        if operator is not None:
            with suppress(Declined):
                return self._call_operator(operator, proto, inputs, attributes, opset, frame)
        schema = schemas.with_body(domain, proto.op_type, opset)
        if schema is None:
            raise Refused("this use of the operator is not supported")
        function = schemas.body(schema, proto, values, opset)
        return self._call_function(function, proto, inputs, attributes, frame)

    def _bounds_of(self, proto: NodeProto, frame: Frame) -> tuple[Ints | None, ...]:
        """Return the bound of each output of a node that is one of the model."""
        return tuple(self.bounds.get(name) if frame.depth == 0 else None for name in proto.output)

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
            opsets={**frame.opsets, **{plain_domain(e.domain): e.version for e in function.opset_import}},
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
        self,
        operator: Operator,
        proto: NodeProto,
        inputs: Sequence[Any],
        attributes: Mapping[str, Any],
        opset: int,
        frame: Frame,
    ) -> Sequence[Any]:
        """Call a function of the table; every named output must come out of it."""
        bounds = self._bounds_of(proto, frame)
        node = Node(op_type=proto.op_type, opset=opset, outputs=tuple(map(bool, proto.output)), bounds=bounds)

        def apply(given: Sequence[Any]) -> Sequence[Any]:
            result = binding.call(operator, node, given, attributes)
            return list(result) if isinstance(result, tuple) else [result]

        use = counted.Use(name=proto.op_type, opset=opset, inputs=inputs, attributes=attributes, apply=apply)
        if counted.is_counted(proto.op_type, inputs):
            values: Sequence[Any] = counted.outputs(operator.domain, use)
        else:
            values = counted.follow_range(operator.domain, use, apply(inputs))
        for i, name in enumerate(proto.output):
            if name and (i >= len(values) or values[i] is None):
                raise Refused(f"output {i} '{name}' is not supported")
        return values


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
        raise Refused(f"no earlier node makes its input '{name}'") from None


def _check_dtypes(domain: str, proto: NodeProto, opset: int, inputs: Sequence[Any]) -> None:
    """Refuse inputs of different dtypes where the schema wants one: torch would promote them."""
    for name, value in zip(proto.input, inputs, strict=True):
        narrow = narrow_type(value)
        if narrow and (domain, proto.op_type) != ("", "DequantizeLinear"):
            raise Refused(f"input '{name}' is {narrow}, which only DequantizeLinear may read")
    types: dict[str, tuple[str, Any]] = {}
    for i, (parameter, homogeneous) in enumerate(schemas.typed_inputs(domain, proto.op_type, opset, len(inputs))):
        value = inputs[i]
        if not homogeneous or not isinstance(value, Tensor):
            continue
        name, dtype = types.setdefault(parameter, (proto.input[i], value.dtype))
        if dtype != value.dtype:
            raise Refused(f"input '{proto.input[i]}' is {value.dtype}; expected {dtype}, as '{name}'")
