"""Comparisons, logic and selection."""

import torch
from torch import Tensor

from nimblec.onnx_ops.arithmetic import choose
from nimblec.onnx_ops.table import op
from nimblec.onnx_ops.unsigned import bitwise, ordered


@op("Equal", since=7)
@bitwise
def equal(a: Tensor, b: Tensor) -> Tensor:
    return torch.eq(a, b)


@op("Greater", since=7)
def greater(a: Tensor, b: Tensor) -> Tensor:
    return torch.gt(ordered(a), ordered(b))


@op("GreaterOrEqual", since=12)
def greater_or_equal(a: Tensor, b: Tensor) -> Tensor:
    return torch.ge(ordered(a), ordered(b))


@op("Less", since=7)
def less(a: Tensor, b: Tensor) -> Tensor:
    return torch.lt(ordered(a), ordered(b))


@op("LessOrEqual", since=12)
def less_or_equal(a: Tensor, b: Tensor) -> Tensor:
    return torch.le(ordered(a), ordered(b))


@op("And", since=7)
def logical_and(a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_and(a, b)


@op("Or", since=7)
def logical_or(a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_or(a, b)


@op("Xor", since=7)
def logical_xor(a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_xor(a, b)


@op("Not")
def logical_not(x: Tensor) -> Tensor:
    return torch.logical_not(x)


@op("IsNaN", since=9)
def is_nan(x: Tensor) -> Tensor:
    return torch.isnan(x)


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
