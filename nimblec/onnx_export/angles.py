"""Angles, of which torch.onnx.export has a wrong sign where a coordinate is zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import pi
from typing import Any

from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import common, core


def atan2(y: Any, x: Any, dtype: Any) -> Any:
    """The angle of (x, y): that of (|x|, |y|), mirrored at an axis where a coordinate is negative, be it -0."""
    zero, half_turn = (common.constant(value, dtype=dtype) for value in (0.0, pi))
    upright, across = op.Abs(y), op.Abs(x)
    angle = op.Where(op.Equal(upright, zero), upright, op.Atan(op.Div(upright, across)))
    angle = op.Where(_is_negative(x, zero), op.Sub(half_turn, angle), angle)
    return op.Where(_is_negative(y, zero), op.Neg(angle), angle)


def _is_negative(value: Any, zero: Any) -> Any:
    """Of -0, whose reciprocal is below zero, too."""
    return op.Less(op.Min(value, op.Reciprocal(value)), zero)


@contextmanager
def exact_angles() -> Iterator[None]:
    """Have torch.onnx take `atan2` for real and for complex numbers, of which it takes no translation of ours."""
    before = core._atan2  # what both of its own translations call
    core._atan2 = atan2
    try:
        yield
    finally:
        core._atan2 = before
