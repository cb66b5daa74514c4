"""Element-wise arithmetic."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.axes import zero_like
from nimblec.onnx_ops.table import Refused, op
from nimblec.onnx_ops.unsigned import SIGNED, bitwise, by_value, divide_uint64, not_zero, ordered

UNARY = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Log": torch.log,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
}


def _enter_unary(name: str) -> None:
    function = UNARY[name]

    @op(name)
    def unary(x: Tensor) -> Tensor:
        return function(x)


for _name in UNARY:
    _enter_unary(_name)


@op("Identity")
def identity(x: Any) -> Any:
    return x


@op("Abs")
def absolute(x: Tensor) -> Tensor:
    return x if not x.dtype.is_signed else torch.abs(x)


@op("Neg")
def negative(x: Tensor) -> Tensor:
    return torch.neg(x)


@op("Sign")
def sign(x: Tensor) -> Tensor:
    if not x.dtype.is_signed:
        return not_zero(x).to(x.dtype)
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.dtype.is_floating_point else torch.sign(x)


@op("Add", since=7)
@bitwise
def add(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b)


@op("Sub", since=7)
@bitwise
def subtract(a: Tensor, b: Tensor) -> Tensor:
    return torch.sub(a, b)


@op("Mul", since=7)
@bitwise
def multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mul(a, b)


@op("Div", since=7)
def divide(a: Tensor, b: Tensor) -> Tensor:
    return divide_uint64(a, b) if a.dtype == torch.uint64 else _divide(a, b)


@by_value
def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


@op("Mod", since=10)
def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype == torch.uint64:
        return subtract(a, multiply(divide_uint64(a, b), b))
    return _modulo(a, b, fmod)


@by_value
def _modulo(a: Tensor, b: Tensor, fmod: int) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@op("Pow", since=7)
def power(x: Tensor, y: Tensor) -> Tensor:
    if y.dtype == torch.uint64 and x.dtype.is_floating_point:
        y = y.to(x.dtype)
    if torch.uint64 in (x.dtype, y.dtype):
        raise Refused(f"has inputs of {x.dtype} and {y.dtype}; expected other dtypes than uint64")
    if not isinstance(y, FakeTensor) and y.dim() == 0 and x.dtype.is_floating_point:
        return torch.pow(x, y.item())
    return torch.pow(ordered(x), ordered(y)).to(x.dtype)


@op("Max", since=6)
def maximum(*data_0: Tensor) -> Tensor:
    return reduce(_larger, data_0)


@op("Min", since=6)
def minimum(*data_0: Tensor) -> Tensor:
    return reduce(_smaller, data_0)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in SIGNED:
        return choose(ordered(a) >= ordered(b), a, b)
    return torch.maximum(a, b)


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in SIGNED:
        return choose(ordered(a) <= ordered(b), a, b)
    return torch.minimum(a, b)


@bitwise
def choose(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x`` where the condition holds, else ``y``, for every dtype."""
    return torch.where(condition, x, y)


@op("Sum", since=6)
def total(*data_0: Tensor) -> Tensor:
    return reduce(torch.add, data_0)


@op("Mean", since=6)
def mean(*data_0: Tensor) -> Tensor:
    return reduce(torch.add, data_0) / len(data_0)


@op("Clip", since=6)
def clip_to_attributes(
    x: Tensor, *, min: float = -3.4028234663852886e38, max: float = 3.4028234663852886e38
) -> Tensor:
    lowest, highest = torch.tensor((min, max)).to(x.dtype).tolist()  # a half's are infinite by default
    return torch.clamp(x, lowest, highest)


@op("Clip", since=11)
def clip(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    if x.dtype in SIGNED:
        raised = x if min is None else _larger(x, min)
        return raised if max is None else _smaller(raised, max)
    if min is None and max is None:
        return x
    if isinstance(min, FakeTensor) or isinstance(max, FakeTensor):
        return torch.clamp(x, min, max)  # takes two tensors or two numbers, not one of each
    return torch.clamp(x, None if min is None else min.item(), None if max is None else max.item())


@op("BitShift", since=11)
def bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    if direction not in ("LEFT", "RIGHT"):
        raise Refused(f"attribute 'direction' is {direction!r}; expected LEFT or RIGHT")
    bits = 8 * x.element_size()
    if x.dtype == torch.uint64:
        return _shift_uint64(x, y, direction)
    wide, amount = x.to(torch.int64), y.to(torch.int64)
    inside = (amount >= 0) & (amount < bits)
    amount = amount.clamp(0, bits - 1)
    if direction == "LEFT":
        shifted = torch.where(inside, wide << amount, zero_like(wide))
    else:
        shifted = torch.where(inside, wide >> amount, wide >> (bits - 1) >> 1)
    return shifted.to(x.dtype)


def _shift_uint64(x: Tensor, y: Tensor, direction: str) -> Tensor:
    """Shift 64 bit words, with zeros moving in; 64 places or more leave nothing."""
    word, amount = x.view(torch.int64), ordered(y) ^ torch.tensor(-(1 << 63))
    inside = (amount >= 0) & (amount < 64)
    amount = amount.clamp(0, 63)
    if direction == "LEFT":
        shifted = word << amount
    else:
        low_bits = (torch.tensor((1 << 63) - 1) >> (amount - 1).clamp(min=0))
        shifted = torch.where(amount == 0, word, (word >> amount) & low_bits)
    return torch.where(inside, shifted, zero_like(shifted)).view(torch.uint64)


@op("BitwiseAnd", since=18)
@bitwise
def bitwise_and(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_and(a, b)


@op("BitwiseOr", since=18)
@bitwise
def bitwise_or(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_or(a, b)


@op("BitwiseXor", since=18)
@bitwise
def bitwise_xor(a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_xor(a, b)


@op("BitwiseNot", since=18)
@bitwise
def bitwise_not(x: Tensor) -> Tensor:
    return torch.bitwise_not(x)


def _summed(x: Tensor, axis: int, exclusive: int, reverse: int, product: bool) -> Tensor:
    if reverse:
        x = torch.flip(x, [axis])
    if exclusive:
        first = torch.full_like(x.narrow(axis, 0, min(1, x.shape[axis])), int(product))
        x = torch.cat([first, x.narrow(axis, 0, max(0, x.shape[axis] - 1))], axis)
    x = (torch.cumprod if product else torch.cumsum)(x, axis, dtype=x.dtype)
    return torch.flip(x, [axis]) if reverse else x


@op("CumSum", since=11)
@bitwise
def cumulative_sum(x: Tensor, axis: int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _summed(x, axis, exclusive, reverse, product=False)


@op("CumProd", since=26)
@bitwise
def cumulative_product(x: Tensor, axis: int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _summed(x, axis, exclusive, reverse, product=True)
