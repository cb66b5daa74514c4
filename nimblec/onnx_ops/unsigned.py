"""Arithmetic on uint16, uint32 and uint64, for which torch has little more than conversions."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nimblec.onnx_ops.table import Refused

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}

P = ParamSpec("P")
R = TypeVar("R")


def bitwise(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function on the bits of wide unsigned tensors seen as signed ones.

    Right for whatever only moves elements, and for + - * & | ^ ~ << in two's complement. Outputs
    of the signed dtype become unsigned again.
    """
    retyped: Callable[..., R] = function

    @wraps(function)
    def on_bits(*args: P.args, **kwargs: P.kwargs) -> R:
        unsigned = _wide_dtype(args)
        if unsigned is None:
            return function(*args, **kwargs)
        signed = SIGNED[unsigned]
        result = retyped(*[_reinterpret(a, unsigned, signed) for a in args], **kwargs)
        return _reinterpret(result, signed, unsigned)

    return on_bits


def by_value(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function on the values of wide unsigned tensors in a signed dtype that holds them all.

    No signed dtype holds all of uint64: those are refused. Outputs of the wider dtype become
    unsigned again.
    """
    converted: Callable[..., R] = function

    @wraps(function)
    def on_values(*args: P.args, **kwargs: P.kwargs) -> R:
        unsigned = _wide_dtype(args)
        if unsigned is None:
            return function(*args, **kwargs)
        if unsigned not in WIDER:
            raise Refused("has uint64 inputs, which torch cannot compute with; expected another dtype")
        wide = WIDER[unsigned]
        result = converted(*[_convert(a, unsigned, wide) for a in args], **kwargs)
        return _convert(result, wide, unsigned)

    return on_values


index_select = bitwise(torch.index_select)
"""`torch.index_select`, of wide unsigned tensors too."""


@bitwise
def not_zero(x: Tensor) -> Tensor:
    """Return where an element is not zero."""
    return torch.ne(x, 0)


def ordered(x: Tensor) -> Tensor:
    """Return a signed tensor whose elements are in the order of the unsigned ones."""
    if x.dtype in WIDER:
        return x.to(WIDER[x.dtype])
    if x.dtype == torch.uint64:
        return x.view(torch.int64) ^ torch.tensor(-(1 << 63))
    return x


def unordered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unsigned tensor that `ordered` gives as ``x``."""
    return (x ^ torch.tensor(-(1 << 63))).view(dtype) if dtype == torch.uint64 else x.to(dtype)


def _wide_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    for arg in args:
        members = arg if isinstance(arg, (list, tuple)) else [arg]
        for member in members:
            if isinstance(member, Tensor) and member.dtype in SIGNED:
                return member.dtype
    return None


def _reinterpret(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_reinterpret(item, old, new) for item in value)
    return value.view(new) if isinstance(value, Tensor) and value.dtype == old else value


def _convert(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_convert(item, old, new) for item in value)
    return value.to(new) if isinstance(value, Tensor) and value.dtype == old else value


def divide_uint64(a: Tensor, b: Tensor) -> Tensor:
    """Divide 64 bit words as unsigned numbers (Warren, Hacker's Delight, section 9-3)."""
    n, d = a.view(torch.int64), b.view(torch.int64)
    half = torch.bitwise_right_shift(n, 1) & torch.tensor((1 << 63) - 1)
    small = d > 0
    quotient = torch.div(half, torch.where(small, d, torch.ones_like(d)), rounding_mode="floor") << 1
    remainder = n - quotient * d
    quotient = torch.where(ordered(remainder.view(torch.uint64)) >= ordered(b), quotient + 1, quotient)
    large = (ordered(a) >= ordered(b)).to(torch.int64)
    return torch.where(small, quotient, large).view(torch.uint64)
