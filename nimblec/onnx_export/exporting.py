"""The surroundings of every torch.onnx.export: its errors as ours, its faults mended, less work."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import pi
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import common, core
from onnxscript.rewriter._pattern_ir import Constant
from onnxscript.rewriter._rewrite_rule import RewriteRule
from onnxscript.rewriter.rules.common import _no_op
from torch.fx import config
from torch.fx.traceback import NodeSource
from torch.onnx._internal.exporter._building import OpRecorder

from nimblec.onnx_export.complex import complex_views
from nimblec.onnx_export.promotion import even_types
from nimblec.pytorch.export_errors import exporting
from nimblec.pytorch.recurrent import any_steps, padded_sequences


@contextmanager
def exporting_onnx(name: str) -> Iterator[None]:
    """Run torch.onnx.export for the model ``name``. Raises TraceError for what it raises."""
    with (
        exporting(name, "torch.onnx.export"),
        any_steps(),
        padded_sequences(),
        torch.no_grad(),  # with gradients torch 2.11 refuses a parameter times a number
        exact_identities(),
        exact_angles(),
        exact_numbers(),
        even_types(),
        complex_views(),
        rules_by_operator(),
        short_histories(),
    ):
        yield


def atan2(y: Any, x: Any, dtype: Any) -> Any:
    """Return the angle of (x, y): that of (|x|, |y|), mirrored at an axis where a coordinate is negative, be it -0."""
    zero, half_turn = (common.constant(value, dtype=dtype) for value in (0.0, pi))
    upright, across = op.Abs(y), op.Abs(x)
    angle = op.Where(op.Equal(upright, zero), upright, op.Atan(op.Div(upright, across)))
    angle = op.Where(_is_negative(x, zero), op.Sub(half_turn, angle), angle)
    return op.Where(_is_negative(y, zero), op.Neg(angle), angle)


def _is_negative(value: Any, zero: Any) -> Any:
    """Return whether numbers are negative, -0 among them: its reciprocal is below zero, too."""
    return op.Less(op.Min(value, op.Reciprocal(value)), zero)


@contextmanager
def exact_angles() -> Iterator[None]:
    """Have torch.onnx take `atan2` for real and for complex numbers, of which it takes no translation of ours."""
    # Both of torch.onnx's translations call this function.
    before = core._atan2
    core._atan2 = atan2
    try:
        yield
    finally:
        core._atan2 = before


@contextmanager
def short_histories() -> Iterator[None]:
    """Let calls share the notes of those that they were made from, and note no Python stack.

    Each pass over a graph copies all earlier notes of a call.
    """
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is not None:  # torch 2.11 has no such setting
        config.do_not_emit_stack_traces = True
    NodeSource.__deepcopy__ = _itself  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with suppress(AttributeError):  # another thread's export has ended in the meantime
            del NodeSource.__deepcopy__  # type: ignore[attr-defined]
        if before is not None:
            config.do_not_emit_stack_traces = before


def _itself(source: Any, _copied: dict[int, Any]) -> Any:
    return source


@contextmanager
def exact_identities() -> Iterator[None]:
    """Make onnxscript's optimiser drop x + c only where c is exactly zero, and x * c only where it is exactly one.

    Within its tolerances 1e-8 counts as zero: the eps of a divisor was dropped, and 0 / 0 gave NaN.
    """
    found = (value for rule in _no_op.rules for node in rule._target_pattern for value in node.inputs)
    constants = [value for value in found if isinstance(value, Constant)]
    before = [(value._rel_tol, value._abs_tol) for value in constants]
    for value in constants:
        value._rel_tol = value._abs_tol = 0.0
    try:
        yield
    finally:
        for value, (relative, absolute) in zip(constants, before, strict=True):
            value._rel_tol, value._abs_tol = relative, absolute


@contextmanager
def exact_numbers() -> Iterator[None]:
    """Have torch.onnx.export make a float64 constant of a number that is cast to float64."""
    before = OpRecorder._call_op

    def call(recorder: OpRecorder, signature: Any, inputs: dict[str, Any], attributes: Any, *others: Any) -> Any:
        number = inputs.get("input")
        if isinstance(number, float) and _target(signature.name, inputs, attributes) == onnx_ir.DataType.DOUBLE:
            exact = onnx_ir.tensor(number, onnx_ir.DataType.DOUBLE)
            inputs = {**inputs, "input": recorder.opset.Constant(value=exact)}
        return before(recorder, signature, inputs, attributes, *others)

    OpRecorder._call_op = call  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        OpRecorder._call_op = before  # type: ignore[method-assign]


def _target(name: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    """Return the dtype that a cast makes; None for another operator."""
    if name == "Cast":
        return attributes["to"]
    return getattr(inputs["target_type"], "dtype", None) if name == "CastLike" else None


@contextmanager
def rules_by_operator() -> Iterator[None]:
    """Make onnxscript's optimiser skip the rules that begin to match at another operator: they cannot apply.

    It tries each rule at each node, and for a pattern of several outputs lists all nodes of the graph first.
    """
    before = RewriteRule.try_rewrite

    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if not rule._target_pattern.output_nodes[0].op.matches(node.op_type):
            return None
        return before(rule, model, graph, node, **options)

    RewriteRule.try_rewrite = try_rewrite  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RewriteRule.try_rewrite = before  # type: ignore[method-assign]
