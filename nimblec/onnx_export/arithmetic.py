"""Arithmetic that torch.onnx exports wrongly, slowly or not at all.

torch.onnx shifts unsigned numbers as signed ones, and spends seven nodes on a right shift where three do. It makes an
integer of an integer to a fractional power, divides integers in float32, and rounds a quotient before rounding it down
(6 // 0.1 is 60, in PyTorch 59). It takes the logarithm of a sigmoid that has rounded to zero, overflows in a sum of
powers, and loses the sign of -0. It counts steps of 0.1 in float32, where 0.6 may have seven.
"""

from collections.abc import Callable
from functools import partial
from math import e, log, pi
from typing import Any

import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, nn, special

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_export.constants import described, like

aten, prims = torch.ops.aten, torch.ops.prims

_UNSIGNED = (onnx_ir.DataType.UINT8, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT32, onnx_ir.DataType.UINT64)
_DIVISIBLE = {onnx_ir.DataType.INT32: 31, onnx_ir.DataType.INT64: 63}
"""Of the integers that ONNX Runtime divides, the bits without the sign."""
_FLOATS = {
    -1: torch.float32,
    onnx_ir.DataType.FLOAT: torch.float32,
    onnx_ir.DataType.FLOAT16: torch.float16,
    onnx_ir.DataType.DOUBLE: torch.float64,
}
"""The types of numbers at steps; -1 is that which the export gives them by default."""


def shift_right(self: Any, other: int) -> Any:
    """Translate aten.__rshift__.Scalar: of signed numbers, to a division rounded down."""
    if self.dtype in _UNSIGNED:
        return op.BitShift(self, like(other, self), direction="RIGHT")
    if self.dtype not in _DIVISIBLE or not 0 <= other < _DIVISIBLE[self.dtype]:
        return core.aten_bitwise_right_shift_tensor_scalar(self, other)
    rest = op.BitwiseAnd(self, like((1 << other) - 1, self))
    return op.Div(op.Sub(self, rest), like(1 << other, self))


def shift_right_by(self: Any, other: Any) -> Any:
    """Translate aten.bitwise_right_shift.Tensor."""
    if self.dtype in _UNSIGNED and other.dtype == self.dtype:
        return op.BitShift(self, other, direction="RIGHT")
    return core.aten_bitwise_right_shift(self, other)


def shift_left(self: Any, other: int) -> Any:
    """Translate aten.__lshift__.Scalar."""
    if self.dtype in _UNSIGNED:
        return op.BitShift(self, like(other, self), direction="LEFT")
    return core.aten_bitwise_left_shift_tensor_scalar(self, other)


def shift_left_by(self: Any, other: Any) -> Any:
    """Translate aten.bitwise_left_shift.Tensor."""
    if self.dtype in _UNSIGNED and other.dtype == self.dtype:
        return op.BitShift(self, other, direction="LEFT")
    return core.aten_bitwise_left_shift(self, other)


def log_sigmoid(self: Any) -> Any:
    """Translate aten.log_sigmoid as min(x, 0) - log(1 + exp(-|x|)), finite where the sigmoid rounds to zero."""
    near = op.Log(op.Add(op.Exp(op.Neg(op.Abs(self))), like(1, self)))
    return op.Sub(op.Min(self, like(0, self)), near)


def log_add(base: float, self: Any, other: Any) -> Any:
    """Translate aten.logaddexp and logaddexp2 as the larger plus a correction: the power of either may be infinite."""
    zero = like(0, self)
    apart = op.Where(op.Equal(self, other), zero, op.Abs(op.Sub(self, other)))
    added = op.Log(op.Add(op.Exp(op.Mul(apart, like(-log(base), self))), like(1, self)))
    return op.Add(op.Max(self, other), op.Div(added, like(log(base), self)))


def power(self: Any, exponent: Any) -> Any:
    """Translate aten.pow.Tensor_Tensor in the type that PyTorch promotes both to; torch.onnx takes the base's."""
    if _outranks(exponent, self):
        self = op.Cast(self, to=exponent.dtype)
    return core.aten_pow(self, exponent)


def _outranks(first: Any, second: Any) -> bool:
    """Return whether the first's type is also that of both; a number's width does not count beside a tensor."""
    kinds = [bool(each.dtype.is_floating_point()) for each in (first, second)]
    if kinds[0] != kinds[1]:
        return kinds[0]
    return bool(first.dtype.bitwidth > second.dtype.bitwidth) and (len(first.shape) > 0 or len(second.shape) == 0)


def remainder(self: Any, other: Any) -> Any:
    """Translate aten.remainder, exactly: what is left of the quotient that is rounded down."""
    self, other = _tensors(self, other)
    if self.dtype.is_integer():
        return core.aten_remainder(self, other)
    rest, is_below = _rest(self, other)
    return op.Where(is_below, op.Add(rest, other), rest)


def floor_divide(self: Any, other: Any) -> Any:
    """Translate aten.floor_divide, which rounds the exact quotient down, not the quotient that was already rounded."""
    self, other = _tensors(self, other)
    if self.dtype.is_integer():
        return core.aten_floor_divide(self, other)
    rest, is_below = _rest(self, other)
    whole = op.Div(op.Sub(self, rest), other)
    whole = op.Round(op.Where(is_below, op.Sub(whole, like(1, self)), whole))
    return op.Where(op.Equal(other, like(0, self)), op.Div(self, other), whole)


def divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """Translate aten.div.Tensor_mode, of integers without a detour by float32."""
    self, other = _tensors(self, other)
    if rounding_mode == "floor":
        return floor_divide(self, other)
    if rounding_mode == "trunc" and self.dtype.is_integer():
        return op.Div(self, other)
    return core.aten_div_mode(self, other, rounding_mode)


def add(self: Any, other: Any, alpha: float = 1.0) -> Any:
    """Translate aten.add.Tensor."""
    if self.dtype == onnx_ir.DataType.BOOL and alpha:
        number = like(other, self) if isinstance(other, bool) else other
        if isinstance(other, bool) or other.dtype == onnx_ir.DataType.BOOL:
            return op.Or(self, number)
    return core.aten_add(self, other, alpha)


def steps(start: Any, end: Any, step: Any = 1, dtype: int = -1, **options: Any) -> Any:
    """Translate aten.arange.start_step, of fractions as a constant, which PyTorch counts in float64."""
    bounds = (start, end, step)
    is_known = all(isinstance(bound, int | float) for bound in bounds)
    if is_known and any(isinstance(bound, float) for bound in bounds) and dtype in _FLOATS:
        return op.Constant(value=numpy_helper.from_array(torch.arange(*bounds, dtype=_FLOATS[dtype]).numpy()))
    return core.aten_arange_start_step(start, end, step, dtype, **options)


def signbit(self: Any) -> Any:
    """Translate aten.signbit: whether a number is below zero, as -0 is."""
    zero = like(0, self)
    below = op.Less(self, zero)
    return below if self.dtype.is_integer() else op.Or(below, op.Less(op.Reciprocal(self), zero))


def hypot(self: Any, other: Any) -> Any:
    """Translate prims.hypot as the longer side times a root, as its square may be infinite."""
    longer, shorter = (choose(op.Abs(self), op.Abs(other)) for choose in (op.Max, op.Min))
    ratio = op.Div(shorter, longer)
    length = op.Mul(longer, op.Sqrt(op.Add(op.Mul(ratio, ratio), like(1, self))))
    has_no_ratio = op.Or(op.Equal(longer, like(0, self)), op.IsInf(longer))
    return op.Where(has_no_ratio, longer, length)


def relu(self: Any) -> Any:
    """Translate aten.relu of int64 as a maximum, since ONNX Runtime has no Relu kernel for int64."""
    return op.Max(self, like(0, self)) if self.dtype == onnx_ir.DataType.INT64 else op.Relu(self)


def rrelu(
    self: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_generator: object
) -> tuple[Any, Any]:
    """Translate aten.rrelu_with_noise_functional in evaluation mode: below zero the slope is the mean of its bounds."""
    if training:
        raise UnsupportedModelError("rrelu draws random numbers in training mode: call .eval() first")
    return op.LeakyRelu(self, alpha=(lower + upper) / 2), op.Identity(noise)


def _in_float64(exact: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a translation that is ``exact`` in float64, whose numbers the ``other`` one rounds to float32."""

    def translated(self: Any, *numbers: Any, **named: Any) -> Any:
        return (exact if self.dtype == onnx_ir.DataType.DOUBLE else other)(self, *numbers, **named)

    return translated


def logarithm(base: float, self: Any) -> Any:
    """Translate aten.log2 and aten.log10."""
    return op.Div(op.Log(self), like(log(base), self))


def sinc(self: Any) -> Any:
    """Translate aten.sinc."""
    angle = op.Mul(self, like(pi, self))
    return op.Where(op.Equal(self, like(0, self)), like(1, self), op.Div(op.Sin(angle), angle))


def add_product(self: Any, tensor1: Any, tensor2: Any, value: float = 1) -> Any:
    """Translate aten.addcmul."""
    return op.Add(self, op.Mul(op.Mul(like(value, self), tensor1), tensor2))


def add_quotient(self: Any, tensor1: Any, tensor2: Any, value: float = 1) -> Any:
    """Translate aten.addcdiv."""
    return op.Add(self, op.Mul(op.Div(tensor1, tensor2), like(value, self)))


def hardtanh(self: Any, min_val: float = -1, max_val: float = 1) -> Any:
    """Translate aten.hardtanh."""
    return op.Clip(self, like(min_val, self), like(max_val, self))


def fill(self: Any, value: float) -> Any:
    """Translate aten.fill.Scalar."""
    return op.Expand(like(value, self), op.Shape(self))


def _of_floats(rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the translation of aten.floor or its like; integers are their own results."""
    return lambda self: op.Identity(self) if self.dtype.is_integer() else rounded(self)


def _but_nan(better: Callable[..., Any]) -> Callable[..., Any]:
    """Return the translation of prims.fmax or fmin: the better of two numbers, or the one that is not NaN."""

    def translated(self: Any, other: Any) -> Any:
        if self.dtype.is_integer():
            return better(self, other)
        return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, better(self, other)))

    return translated


def _tensors(self: Any, other: Any) -> list[Any]:
    """Return both operands, a number as a tensor of the other's type."""
    typed = other if isinstance(self, int | float) else self
    return [described(like(x, typed), [], typed) if isinstance(x, int | float) else x for x in (self, other)]


def _rest(self: Any, other: Any) -> tuple[Any, Any]:
    """Return the remainder of the quotient rounded towards zero, and whether that exceeds the one rounded down."""
    zero = like(0, self)
    rest = op.Mod(self, other, fmod=1)
    differ = op.Not(op.Equal(op.Less(rest, zero), op.Less(other, zero)))
    return rest, op.And(op.Not(op.Equal(rest, zero)), differ)


ARITHMETIC: dict[Any, Any] = {
    aten.__rshift__.Scalar: shift_right,
    aten.bitwise_right_shift.Tensor_Scalar: shift_right,
    aten.bitwise_right_shift.Tensor: shift_right_by,
    aten.__rshift__.Tensor: shift_right_by,
    aten.__lshift__.Scalar: shift_left,
    aten.__lshift__.Tensor: shift_left_by,
    aten.bitwise_left_shift.Tensor_Scalar: shift_left,
    aten.bitwise_left_shift.Tensor: shift_left_by,
    aten.log_sigmoid.default: log_sigmoid,
    aten.logaddexp.default: partial(log_add, e),
    aten.logaddexp2.default: partial(log_add, 2),
    aten.pow.Tensor_Tensor: power,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.floor_divide.default: floor_divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.floor.default: _of_floats(op.Floor),
    aten.ceil.default: _of_floats(op.Ceil),
    aten.round.default: _of_floats(op.Round),
    aten.trunc.default: _of_floats(core.aten_trunc),
    aten.relu.default: relu,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.add.Tensor: add,
    aten.arange.start_step: steps,
    aten.signbit.default: signbit,
    prims.signbit.default: signbit,
    prims.hypot.default: hypot,
    prims.fmax.default: _but_nan(op.Max),
    prims.fmin.default: _but_nan(op.Min),
    aten.log2.default: _in_float64(partial(logarithm, 2), core.aten_log2),
    aten.log10.default: _in_float64(partial(logarithm, 10), core.aten_log10),
    aten.sinc.default: _in_float64(sinc, special.aten_special_sinc),
    aten.special_sinc.default: _in_float64(sinc, special.aten_special_sinc),
    aten.addcmul.default: _in_float64(add_product, core.aten_addcmul),
    aten.addcdiv.default: _in_float64(add_quotient, core.aten_addcdiv),
    aten.hardtanh.default: _in_float64(hardtanh, nn.aten_hardtanh),
    aten.fill.Scalar: _in_float64(fill, core.aten_fill),
}
"""Translations for torch.onnx.export of any model."""
