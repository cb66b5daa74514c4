"""Operators along axes that torch.onnx exports into what a plan cannot hold, or not at all.

A stable sort it does not know, though ONNX's is one, nor medians, running extremes and products, places among sorted
values, or distances of all pairs. Tensors that are stacked become a sequence, and it squeezes axes of any size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

from nimblec.onnx_export.constants import described, ints, like, size, unsqueezed

aten = torch.ops.aten

_BOOL, _INT32, _INT64 = onnx_ir.DataType.BOOL, onnx_ir.DataType.INT32, onnx_ir.DataType.INT64
_FEW = 25
"""Rows of which PyTorch computes Euclidean distances without a matrix product."""
_EUCLIDEAN, _ALWAYS, _NEVER = 2, 1, 2
"""The norm of these, and the modes of cdist in which they are always or never computed by one."""
_NORMS: dict[float, Callable[..., Any]] = {1: op.ReduceL1, 2: op.ReduceL2}

Combine = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""Of what came before and of an element's own values, those of both; associative."""


def extreme(plain: Callable[..., Any], self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Translate aten.amax or aten.amin, by default of all elements."""
    return plain(self, ints(dim), keepdim) if len(self.shape) else op.Identity(self)


def extreme_along(plain: Callable[..., Any], self: Any, dim: int, keepdim: bool = False) -> Any:
    """Translate aten.max.dim or aten.min.dim, which ONNX lacks for truth values."""
    if self.dtype != _BOOL:
        return plain(self, dim, keepdim)
    numbers: Any = op.Cast(self, to=_INT32)
    numbers.shape, numbers.dtype = self.shape, _INT32
    value, place = plain(numbers, dim, keepdim)
    return op.Cast(value, to=_BOOL), place


def squeeze(self: Any, dim: int) -> Any:
    """Translate aten.squeeze.dim, which keeps an axis of another size than one."""
    is_one = len(self.shape) and self.shape[dim] == 1
    return op.Squeeze(self, ints([dim])) if is_one else op.Identity(self)


def stable_sort(self: Any, dim: int = -1, descending: bool = False, **_stable: Any) -> Any:
    """Translate aten.sort.stable: ONNX's TopK keeps the order of equal values."""
    return core.aten_sort(self, dim, descending)


def kth_value(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Translate aten.kthvalue as the last of the k smallest, and its place."""
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    axis, last = ints([dim]), ints([k - 1])
    smallest = op.TopK(self, ints([k]), axis=dim, largest=False, sorted=True)
    found = (op.Gather(each, last, axis=dim) for each in smallest)
    return tuple(each if keepdim else op.Squeeze(each, axis) for each in found)


def median_along(self: Any, dim: int, keepdim: bool = False) -> Any:
    """Translate aten.median.dim: the lower of two in the middle; NaN, and its place, where there is one."""
    count = size(self, dim) if len(self.shape) else 1
    value, place = kth_value(self, (count + 1) // 2, dim, keepdim)
    if self.dtype.is_integer() or not len(self.shape):
        return value, place
    is_nan: Any = op.Cast(op.IsNaN(self), to=_INT32)
    has_nan: Any = op.Cast(op.ReduceMax(is_nan, ints([dim]), keepdims=keepdim), to=onnx_ir.DataType.BOOL)
    first = op.ArgMax(is_nan, axis=dim, keepdims=keepdim)
    return op.Where(has_nan, like(float("nan"), self), value), op.Where(has_nan, first, place)


def median(self: Any) -> Any:
    """Translate aten.median of all elements."""
    if not len(self.shape):
        return op.Identity(self)
    count = prod(size(self, axis) for axis in range(len(self.shape)))
    return median_along(described(op.Reshape(self, ints([-1])), [count], self), 0)[0]


def running_product(self: Any, dim: int, dtype: int = -1) -> Any:
    """Translate aten.cumprod, of integers in 64 bits."""
    if dtype == -1 and self.dtype.is_integer():
        dtype = _INT64
    cast = self if dtype == -1 else op.Cast(self, to=dtype)
    return _scan([cast], self, dim, lambda before, own: [op.Mul(*before, *own)])[0]


def running_extreme(leads: Callable[[Any, Any], Any], self: Any, dim: int) -> Any:
    """Translate aten.cummax or aten.cummin, with the last place of each value that ``leads``, or is NaN."""
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    along = np.arange(size(self, dim)).reshape([-1, *[1] * (len(self.shape) - 1 - dim % len(self.shape))])
    places: Any = op.Constant(value=numpy_helper.from_array(along))
    places = op.Expand(places, op.Shape(self))

    def combine(before: Sequence[Any], own: Sequence[Any]) -> Sequence[Any]:
        is_own = leads(own[0], before[0])
        if not self.dtype.is_integer():
            is_own = op.Or(op.IsNaN(own[0]), op.And(is_own, op.Not(op.IsNaN(before[0]))))
        return [op.Where(is_own, *pair) for pair in zip(own, before, strict=True)]

    return tuple(_scan([self, places], self, dim, combine))


def _scan(values: Sequence[Any], self: Any, dim: int, combine: Combine) -> Sequence[Any]:
    """Scan an axis of ``self``; each round combines twice as many elements (Hillis and Steele)."""
    length = size(self, dim) if len(self.shape) else 1
    reach = 1
    while reach < length:
        head, before, own = (
            [op.Slice(each, ints([begin]), ints([end]), ints([dim])) for each in values]
            for begin, end in ((0, reach), (0, length - reach), (reach, length))
        )
        values = [op.Concat(*parts, axis=dim) for parts in zip(head, combine(before, own), strict=True)]
        reach *= 2
    return values


def place_among(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Translate aten.searchsorted by counting the values before each place, with equal ones for ``right``."""
    if isinstance(self, int | float):
        self = like(self, sorted_sequence)
    has_rows = len(sorted_sequence.shape) > 1
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    if has_rows:
        sorted_sequence = op.Unsqueeze(sorted_sequence, ints([-2]))
    compare = op.LessOrEqual if right or side == "right" else op.Less
    comes_before = compare(sorted_sequence, op.Unsqueeze(self, ints([-1])))
    counted: Any = op.Cast(comes_before, to=_INT32 if out_int32 else _INT64)
    return op.ReduceSum(counted, ints([-1]), keepdims=0)


def distances(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """Translate aten._cdist_forward: p-norms of the differences of all rows of (..., P, M) and (..., R, M)."""
    is_long = max(size(x1, -2), size(x2, -2)) > _FEW
    if p == _EUCLIDEAN and (compute_mode == _ALWAYS or (is_long and compute_mode != _NEVER)):
        squares, others = (op.ReduceSum(op.Mul(x, x), ints([-1]), keepdims=1) for x in (x1, x2))
        products = op.MatMul(x1, _transposed(x2))
        square = op.Sub(op.Add(squares, _transposed(others)), op.Add(products, products))
        return op.Sqrt(op.Max(square, like(0, x1)))
    difference = op.Abs(op.Sub(op.Unsqueeze(x1, ints([-2])), op.Unsqueeze(x2, ints([-3]))))
    last = ints([-1])
    if p == inf:
        return op.ReduceMax(difference, last, keepdims=0)
    if p == 0:
        differs = op.Not(op.Equal(difference, like(0, x1)))
        return op.ReduceSum(op.CastLike(differs, x1), last, keepdims=0)
    if p in _NORMS:
        return _NORMS[p](difference, last, keepdims=0)
    total = op.ReduceSum(op.Pow(difference, like(p, x1)), last, keepdims=0)
    return op.Pow(total, like(1 / p, x1))


def _transposed(x: Any) -> Any:
    rank = len(x.shape)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def stacked(axis: int, missing: Callable[[int], Sequence[int]], tensors: Sequence[Any]) -> Any:
    """Concatenate tensors along ``axis``, first adding the axes of size one that are ``missing`` at their rank."""
    return op.Concat(*(unsqueezed(x, missing(len(x.shape))) for x in tensors), axis=axis)


def horizontally(tensors: Sequence[Any]) -> Any:
    """Translate aten.hstack, which joins vectors along their one axis."""
    flat = max(len(x.shape) for x in tensors) <= 1
    return stacked(0 if flat else 1, lambda rank: () if rank else (0,), tensors)


ALONG_AXES: dict[Any, Any] = {
    aten.amax.default: partial(extreme, core.aten_amax),
    aten.amin.default: partial(extreme, core.aten_amin),
    aten.max.dim: partial(extreme_along, core.aten_max_dim),
    aten.min.dim: partial(extreme_along, core.aten_min_dim),
    aten.squeeze.dim: squeeze,
    aten.sort.stable: stable_sort,
    aten.kthvalue.default: kth_value,
    aten.median.default: median,
    aten.median.dim: median_along,
    aten.cumprod.default: running_product,
    aten.cummax.default: partial(running_extreme, op.GreaterOrEqual),
    aten.cummin.default: partial(running_extreme, op.LessOrEqual),
    aten.searchsorted.Tensor: place_among,
    aten.searchsorted.Scalar: place_among,
    aten._cdist_forward.default: distances,
    aten.hstack.default: horizontally,
    aten.vstack.default: partial(stacked, 0, lambda rank: range(2 - rank)),
    aten.dstack.default: partial(stacked, 2, lambda rank: ((0, 1, 2), (0, 2), (2,))[rank] if rank <= 2 else ()),
    aten.column_stack.default: partial(stacked, 1, lambda rank: ((0, 1), (1,))[rank] if rank <= 1 else ()),
}
"""Translations for torch.onnx.export of any model."""
