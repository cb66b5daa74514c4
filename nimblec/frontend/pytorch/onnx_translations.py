"""Translations for what torch.onnx exports wrongly, slowly or not at all: state writes, batch norms, shifts, attention.

Writes of a few rows of a tensor become ScatterND, which ONNX Runtime does in place. torch.onnx transposes the tensor
before and after where the rows are not of its first dimension: two copies of a whole cache. Here every
dimension up to theirs is indexed instead, and each row is one contiguous copy.

Batch norm in training mode is written out: torch.onnx exports it as if it were in evaluation mode. It shifts unsigned
numbers as if they had signs; a shift to the right, of which random numbers take many, is three nodes for its seven.
Attention of other than four axes it refuses.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, nn

aten = torch.ops.aten

_ATTENTION_AXES = 4
_UNSIGNED = (onnx_ir.DataType.UINT8, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT32, onnx_ir.DataType.UINT64)
_DIVISIBLE = {onnx_ir.DataType.INT32: 31, onnx_ir.DataType.INT64: 63}
"""Of the integers that ONNX Runtime divides, the bits without the sign."""


def index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """aten.index_copy: rows of ``source`` to the positions ``index`` of a dimension."""
    dim %= max(len(self.shape), 1)
    return _write_rows(self, dim, index, source) if len(self.shape) else source


def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """aten.index_put: as `index_copy` where one dimension is indexed by a number or a list of them."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or accumulate or len(given[0][1].shape) > 1 or given[0][1].dtype != onnx_ir.DataType.INT64:
        return core.aten_index_put(self, indices, values, accumulate)
    ((dim, index),) = given
    shape = _shape(self)
    rows = _shape(index)
    source = op.Expand(values, _ints([*shape[:dim], *rows, *shape[dim + 1 :]]))
    if not rows:
        source = op.Unsqueeze(source, _ints([dim]))
    return _write_rows(self, dim, index, source, count=prod(rows))


def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    """aten.select_scatter: one row at a known position."""
    dim %= len(self.shape)
    return _write_rows(self, dim, _ints([index]), op.Unsqueeze(src, _ints([dim])), count=1)


def slice_scatter(
    self: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """aten.slice_scatter: rows at known positions; where they are most of the tensor, the rest is put around them."""
    shape = _shape(self)
    dim %= len(shape)
    positions = range(shape[dim])[slice(start, end, step)]
    src = op.Expand(src, _ints([*shape[:dim], len(positions), *shape[dim + 1 :]]))
    if not positions:
        return op.Identity(self)
    if step != 1 or 2 * len(positions) < shape[dim]:
        return _write_rows(self, dim, _ints(positions), src, count=len(positions))
    parts = [(0, positions[0]), (positions[-1] + 1, shape[dim])]
    before, after = ([op.Slice(self, _ints([a]), _ints([b]), _ints([dim]))] if a < b else [] for a, b in parts)
    return op.Concat(*before, src, *after, axis=dim)


def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """aten._native_batch_norm_legit_functional: normalised values, what a backward pass needs, the new statistics."""
    if not training:
        return core.aten__native_batch_norm_legit_functional(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
    shape = _shape(x)
    others = [axis for axis in range(len(shape)) if axis != 1]
    along = _ints([1, shape[1], *[1] * (len(shape) - 2)])
    mean = op.ReduceMean(x, _ints(others))
    centred = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(centred, centred), _ints(others))
    scale = op.Reciprocal(op.Sqrt(op.Add(var, _number(eps, var))))
    y = op.Mul(centred, scale)
    if weight is not None:
        y = op.Mul(y, op.Reshape(weight, along))
    if bias is not None:
        y = op.Add(y, op.Reshape(bias, along))
    flat = _ints([shape[1]])
    mean, var, scale = (op.Reshape(value, flat) for value in (mean, var, scale))
    count = prod(shape[axis] for axis in others)
    unbiased = op.Mul(var, _number(count / max(count - 1, 1), var))
    moved = (
        op.Add(op.Mul(old, _number(1 - momentum, old)), op.Mul(new, _number(momentum, new)))
        for old, new in ((running_mean, mean), (running_var, unbiased))
    )
    return y, mean, scale, *moved


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *given: Any, **named: Any) -> Any:
    """aten.scaled_dot_product_attention of any number of axes, of which torch.onnx takes four."""
    read, missing = (query, key, value), _ATTENTION_AXES - len(query.shape)
    if missing > 0:
        axes, lead = _ints(range(missing)), [1] * missing
        read = tuple(_described(op.Unsqueeze(each, axes), [*lead, *each.shape], each) for each in read)
        return op.Squeeze(nn.aten_scaled_dot_product_attention(*read, attn_mask, *given, **named), axes)
    *lead, rows, _ = query.shape
    if missing == 0 or any(list(each.shape)[:-2] != lead for each in read):
        return nn.aten_scaled_dot_product_attention(*read, attn_mask, *given, **named)
    if attn_mask is not None:
        span = [*lead, rows, key.shape[-2]]
        attn_mask = _folded(_described(op.Expand(attn_mask, _ints(span)), span, attn_mask))
    made = nn.aten_scaled_dot_product_attention(*map(_folded, read), attn_mask, *given, **named)
    return op.Reshape(made, _ints([*lead, rows, value.shape[-1]]))


def shift_right(self: Any, other: int) -> Any:
    """aten.__rshift__.Scalar: that of numbers with signs, which keeps them, is a division without a rest."""
    if self.dtype in _UNSIGNED:
        return op.BitShift(self, _like(other, self), direction="RIGHT")
    if self.dtype not in _DIVISIBLE or not 0 <= other < _DIVISIBLE[self.dtype]:
        return core.aten_bitwise_right_shift_tensor_scalar(self, other)
    rest = op.BitwiseAnd(self, _like((1 << other) - 1, self))
    return op.Div(op.Sub(self, rest), _like(1 << other, self))


def shift_right_by(self: Any, other: Any) -> Any:
    """aten.bitwise_right_shift.Tensor."""
    if self.dtype in _UNSIGNED and other.dtype == self.dtype:
        return op.BitShift(self, other, direction="RIGHT")
    return core.aten_bitwise_right_shift(self, other)


COMMON: dict[Any, Any] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.__rshift__.Scalar: shift_right,
    aten.bitwise_right_shift.Tensor_Scalar: shift_right,
    aten.bitwise_right_shift.Tensor: shift_right_by,
}
"""For any model."""

TRANSLATIONS: dict[Any, Any] = {
    **COMMON,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.index_copy.default: index_copy,
    aten.index_put.default: index_put,
    aten.select_scatter.default: select_scatter,
    aten.slice_scatter.default: slice_scatter,
}
"""For models with state."""


def _write_rows(self: Any, dim: int, positions: Any, source: Any, count: int | None = None) -> Any:
    """``source``, a row for each of the positions, written into a dimension of a tensor."""
    count = _shape(source)[dim] if count is None else count
    lead = (*_shape(self)[:dim], count)
    places = op.Expand(op.Reshape(positions, _ints([*[1] * dim, count, 1])), _ints([*lead, 1]))
    if dim:
        grid = np.moveaxis(np.indices(lead)[:dim], 0, -1).astype(np.int64)
        places = op.Concat(op.Constant(value=numpy_helper.from_array(grid)), places, axis=-1)
    return op.ScatterND(self, places, source)


def _folded(value: Any) -> Any:
    """All axes but the last three as one."""
    shape = _shape(value)
    folded = [prod(shape[:-3]), *shape[-3:]]
    return _described(op.Reshape(value, _ints(folded)), folded, value)


def _described(value: Any, shape: Sequence[Any], like: Any) -> Any:
    """A result with its shape and dtype, which torch.onnx does not infer."""
    value.shape, value.dtype = onnx_ir.Shape(shape), like.dtype
    return value


def _shape(value: Any) -> list[int]:
    return [int(size) for size in value.shape]


def _number(value: float, like: Any) -> Any:
    constant: Any = op.Constant(value_float=value)
    return op.CastLike(constant, like)


def _like(value: int, other: Any) -> Any:
    return op.Constant(value=numpy_helper.from_array(np.array(value, other.dtype.numpy())))


def _ints(values: Sequence[int]) -> Any:
    return op.Constant(value_ints=list(values))
