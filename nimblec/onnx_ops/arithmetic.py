"""Element-wise arithmetic, comparisons and logic."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.onnx_ops.axes import zero_like
from nimblec.onnx_ops.table import Refused, op
from nimblec.onnx_ops.unsigned import SIGNED, bitwise, by_value, divide_uint64, not_zero, ordered

Function = Callable[..., Tensor]


def _ordered(function: Function) -> Function:
    """Compare unsigned tensors by signed ones in the same order."""
    return lambda a, b: function(ordered(a), ordered(b))


UNARY: dict[str, tuple[int, Function]] = {
    "Acos": (1, torch.acos),
    "Acosh": (1, torch.acosh),
    "Asin": (1, torch.asin),
    "Asinh": (1, torch.asinh),
    "Atan": (1, torch.atan),
    "Atanh": (1, torch.atanh),
    "Ceil": (1, torch.ceil),
    "Cos": (1, torch.cos),
    "Cosh": (1, torch.cosh),
    "Erf": (1, torch.erf),
    "Exp": (1, torch.exp),
    "Floor": (1, torch.floor),
    "HardSwish": (14, functional.hardswish),
    "IsNaN": (9, torch.isnan),
    "Log": (1, torch.log),
    "Mish": (18, functional.mish),
    "Neg": (1, torch.neg),
    "Not": (1, torch.logical_not),
    "Reciprocal": (1, torch.reciprocal),
    "Relu": (1, torch.relu),
    "Round": (1, torch.round),
    "Sigmoid": (1, torch.sigmoid),
    "Sin": (1, torch.sin),
    "Sinh": (1, torch.sinh),
    "Softplus": (1, functional.softplus),
    "Sqrt": (1, torch.sqrt),
    "Tan": (1, torch.tan),
    "Tanh": (1, torch.tanh),
}
"""The operators of one input without attributes, each with its first opset."""

BINARY: dict[str, tuple[int, Function]] = {
    "Add": (7, bitwise(torch.add)),
    "And": (7, torch.logical_and),
    "BitwiseAnd": (18, bitwise(torch.bitwise_and)),
    "BitwiseOr": (18, bitwise(torch.bitwise_or)),
    "BitwiseXor": (18, bitwise(torch.bitwise_xor)),
    "Equal": (7, bitwise(torch.eq)),
    "Greater": (7, _ordered(torch.gt)),
    "GreaterOrEqual": (12, _ordered(torch.ge)),
    "Less": (7, _ordered(torch.lt)),
    "LessOrEqual": (12, _ordered(torch.le)),
    "Mul": (7, bitwise(torch.mul)),
    "Or": (7, torch.logical_or),
    "Sub": (7, bitwise(torch.sub)),
    "Xor": (7, torch.logical_xor),
}
"""Those of two inputs."""


def _enter(name: str) -> None:
    since, function = (UNARY | BINARY)[name]

    def unary(x: Tensor) -> Tensor:
        return function(x)

    def binary(a: Tensor, b: Tensor) -> Tensor:
        return function(a, b)

    op(name, since=since)(unary if name in UNARY else binary)


for _name in (*UNARY, *BINARY):
    _enter(_name)


@op("Identity")
def identity(x: Any) -> Any:
    return x


@op("Abs")
def absolute(x: Tensor) -> Tensor:
    return x if not x.dtype.is_signed else torch.abs(x)


@op("Sign")
def sign(x: Tensor) -> Tensor:
    if not x.dtype.is_signed:
        return not_zero(x).to(x.dtype)
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.dtype.is_floating_point else torch.sign(x)


@op("Div", since=7)
def divide(a: Tensor, b: Tensor) -> Tensor:
    return divide_uint64(a, b) if a.dtype == torch.uint64 else _divide(a, b)


@by_value
def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


@op("Mod", since=10)
def modulo(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype == torch.uint64:
        return bitwise(lambda a, quotient, b: a - quotient * b)(a, divide_uint64(a, b), b)
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


@op("IsInf", since=10)
def is_infinite(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.eq(x, float("inf"))
    if detect_negative:
        return torch.eq(x, float("-inf"))
    return torch.zeros_like(x, dtype=torch.bool)


@op("Where", since=9)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return choose(condition, x, y)


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
