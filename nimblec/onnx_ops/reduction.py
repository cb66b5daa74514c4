"""Reductions along axes."""

from collections.abc import Callable

import torch
from torch import Tensor

from nimblec.onnx_ops.axes import axes_of, axis_of
from nimblec.onnx_ops.table import Ints, Refused, op
from nimblec.onnx_ops.unsigned import WIDER, ordered

Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _as_float(function: Reduction) -> Reduction:
    """Reduce integers in double precision and cut the fraction of the result off."""

    def reduce_as_float(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
        if x.dtype.is_floating_point:
            return function(x, axes, keepdim)
        return function(x.to(torch.float64), axes, keepdim).to(x.dtype)

    return reduce_as_float


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim, dtype=x.dtype)


def _product(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim, dtype=x.dtype)
    return x


def _extreme(name: str) -> Reduction:
    def reduce_extreme(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
        if x.dtype == torch.bool:
            function = torch.any if name == "amax" else torch.all
            return function(x, axes, keepdim)
        if any(x.shape[axis] == 0 for axis in axes):
            return _extreme_of_nothing(x, axes, keepdim, largest=name == "amax")
        extreme = torch.amax if name == "amax" else torch.amin
        return extreme(x, axes, keepdim)

    return reduce_extreme


def _extreme_of_nothing(x: Tensor, axes: list[int], keepdim: bool, *, largest: bool) -> Tensor:
    """Return the identity of the reduction: the lowest value for a maximum."""
    if x.dtype.is_floating_point:
        value: float = float("-inf") if largest else float("inf")
    else:
        limits = torch.iinfo(x.dtype)
        value = limits.min if largest else limits.max
    sizes = [1 if i in axes else length for i, length in enumerate(x.shape) if keepdim or i not in axes]
    return torch.full(sizes, value, dtype=x.dtype)


REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": _sum,
    "ReduceMean": _as_float(torch.mean),
    "ReduceProd": _product,
    "ReduceMax": _extreme("amax"),
    "ReduceMin": _extreme("amin"),
    "ReduceL1": lambda x, axes, keepdim: _sum(torch.abs(x), axes, keepdim),
    "ReduceL2": _as_float(lambda x, axes, keepdim: torch.sqrt(torch.sum(x * x, axes, keepdim))),
    "ReduceSumSquare": lambda x, axes, keepdim: _sum(x * x, axes, keepdim),
    "ReduceLogSum": _as_float(lambda x, axes, keepdim: torch.log(torch.sum(x, axes, keepdim))),
    "ReduceLogSumExp": _as_float(torch.logsumexp),
}

AXES_ARE_AN_INPUT_SINCE = {"ReduceSum": 13}
"""Opset from which the axes are an input; 18 for the other reductions."""


def _reduce(function: Reduction, x: Tensor, axes: Ints | None, keepdims: int, noop: int) -> Tensor:
    if not axes:
        axes = () if noop else tuple(range(x.dim()))
    chosen = list(axes_of(axes, x.dim()))
    if x.dtype == torch.uint64:
        raise Refused("has uint64 inputs, which torch cannot compute with; expected another dtype")
    wide = x.to(WIDER.get(x.dtype, x.dtype))
    if chosen:
        return function(wide, chosen, bool(keepdims)).to(x.dtype)
    # Over no axis every element is a group of its own.
    return function(wide.unsqueeze(0), [0], False).to(x.dtype)


def _enter(name: str) -> None:
    function = REDUCTIONS[name]

    @op(name)
    def reduce_attribute(x: Tensor, *, axes: Ints | None = None, keepdims: int = 1) -> Tensor:
        return _reduce(function, x, axes, keepdims, 0)

    @op(name, since=AXES_ARE_AN_INPUT_SINCE.get(name, 18))
    def reduce_input(
        x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        return _reduce(function, x, axes, keepdims, noop_with_empty_axes)


for _name in REDUCTIONS:
    _enter(_name)


def _position(function: Callable[..., Tensor], x: Tensor, axis: int, keepdims: int, last: int) -> Tensor:
    axis, x = axis_of(axis, x.dim()), ordered(x)
    if not last:
        return function(x, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - function(torch.flip(x, [axis]), axis, keepdim=bool(keepdims))


@op("ArgMax")
def arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _position(torch.argmax, x, axis, keepdims, select_last_index)


@op("ArgMin")
def arg_min(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _position(torch.argmin, x, axis, keepdims, select_last_index)
