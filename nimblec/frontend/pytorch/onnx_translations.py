"""Translations for what torch.onnx exports wrongly, slowly or not at all.

Writes of a few rows of a tensor become ScatterND, which ONNX Runtime does in place. torch.onnx transposes the tensor
before and after where the rows are not of its first dimension: two copies of a whole cache. Here every
dimension up to theirs is indexed instead, and each row is one contiguous copy.

Batch norm in training mode is written out: torch.onnx exports it as if it were in evaluation mode. It shifts unsigned
numbers as if they were signed; a right shift, which random numbers need often, is three nodes here and seven there.
Attention of other than four axes it refuses.

Of values that are scattered as a mean it keeps the last one. An integer to a fractional power becomes an integer.
Integers are divided in float32, and a quotient is rounded to a number before it is rounded down: 6 // 0.1 is 60, and 59
in PyTorch. The logarithm of a small sigmoid is that of zero. Of a transposed matrix and a vector, ONNX Runtime 1.32
computes another product.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, nn

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.pytorch.onnx_constants import described, ints, like
from nimblec.frontend.pytorch.onnx_losses import LOSSES
from nimblec.frontend.pytorch.onnx_pooling import POOLING
from nimblec.frontend.pytorch.onnx_resizing import RESIZING

aten = torch.ops.aten

_ATTENTION_AXES = 4
_UNSIGNED = (onnx_ir.DataType.UINT8, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT32, onnx_ir.DataType.UINT64)
_DIVISIBLE = {onnx_ir.DataType.INT32: 31, onnx_ir.DataType.INT64: 63}
"""Of the integers that ONNX Runtime divides, the bits without the sign."""
_NEUTRAL: dict[str, Callable[[np.dtype[Any]], Any]] = {
    "sum": lambda _: 0,
    "mean": lambda _: 0,
    "prod": lambda _: 1,
    "amax": lambda dtype: np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf,
    "amin": lambda dtype: np.iinfo(dtype).max if dtype.kind in "iu" else np.inf,
}
"""Of each reduction, the number of a dtype that changes no result."""


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
    source = op.Expand(values, ints([*shape[:dim], *rows, *shape[dim + 1 :]]))
    if not rows:
        source = op.Unsqueeze(source, ints([dim]))
    return _write_rows(self, dim, index, source, count=prod(rows))


def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    """aten.select_scatter: one row at a known position."""
    dim %= len(self.shape)
    return _write_rows(self, dim, ints([index]), op.Unsqueeze(src, ints([dim])), count=1)


def slice_scatter(
    self: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """aten.slice_scatter: rows at known positions; where they are most of the tensor, the rest is put around them."""
    shape = _shape(self)
    dim %= len(shape)
    positions = range(shape[dim])[slice(start, end, step)]
    src = op.Expand(src, ints([*shape[:dim], len(positions), *shape[dim + 1 :]]))
    if not positions:
        return op.Identity(self)
    if step != 1 or 2 * len(positions) < shape[dim]:
        return _write_rows(self, dim, ints(positions), src, count=len(positions))
    parts = [(0, positions[0]), (positions[-1] + 1, shape[dim])]
    before, after = ([op.Slice(self, ints([a]), ints([b]), ints([dim]))] if a < b else [] for a, b in parts)
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
    along = ints([1, shape[1], *[1] * (len(shape) - 2)])
    mean = op.ReduceMean(x, ints(others))
    centred = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(centred, centred), ints(others))
    scale = op.Reciprocal(op.Sqrt(op.Add(var, _number(eps, var))))
    y = op.Mul(centred, scale)
    if weight is not None:
        y = op.Mul(y, op.Reshape(weight, along))
    if bias is not None:
        y = op.Add(y, op.Reshape(bias, along))
    flat = ints([shape[1]])
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
        axes, lead = ints(range(missing)), [1] * missing
        read = tuple(described(op.Unsqueeze(each, axes), [*lead, *each.shape], each) for each in read)
        return op.Squeeze(nn.aten_scaled_dot_product_attention(*read, attn_mask, *given, **named), axes)
    *lead, rows, _ = query.shape
    if missing == 0 or any(list(each.shape)[:-2] != lead for each in read):
        return nn.aten_scaled_dot_product_attention(*read, attn_mask, *given, **named)
    if attn_mask is not None:
        span = [*lead, rows, key.shape[-2]]
        attn_mask = _folded(described(op.Expand(attn_mask, ints(span)), span, attn_mask))
    made = nn.aten_scaled_dot_product_attention(*map(_folded, read), attn_mask, *given, **named)
    return op.Reshape(made, ints([*lead, rows, value.shape[-1]]))


def matmul(self: Any, other: Any) -> Any:
    """aten.matmul and aten.mv: a vector as a column, since ONNX Runtime fuses a transposed matrix with it wrongly."""
    if len(other.shape) != 1 or len(self.shape) == 1:
        return core.aten_matmul(self, other)
    last = ints([-1])
    return op.Squeeze(op.MatMul(self, op.Unsqueeze(other, last)), last)


def shift_right(self: Any, other: int) -> Any:
    """aten.__rshift__.Scalar: that of numbers with signs, which keeps them, is a division without a rest."""
    if self.dtype in _UNSIGNED:
        return op.BitShift(self, like(other, self), direction="RIGHT")
    if self.dtype not in _DIVISIBLE or not 0 <= other < _DIVISIBLE[self.dtype]:
        return core.aten_bitwise_right_shift_tensor_scalar(self, other)
    rest = op.BitwiseAnd(self, like((1 << other) - 1, self))
    return op.Div(op.Sub(self, rest), like(1 << other, self))


def shift_right_by(self: Any, other: Any) -> Any:
    """aten.bitwise_right_shift.Tensor."""
    if self.dtype in _UNSIGNED and other.dtype == self.dtype:
        return op.BitShift(self, other, direction="RIGHT")
    return core.aten_bitwise_right_shift(self, other)


def shift_left(self: Any, other: int) -> Any:
    """aten.__lshift__.Scalar."""
    if self.dtype in _UNSIGNED:
        return op.BitShift(self, like(other, self), direction="LEFT")
    return core.aten_bitwise_left_shift_tensor_scalar(self, other)


def shift_left_by(self: Any, other: Any) -> Any:
    """aten.bitwise_left_shift.Tensor."""
    if self.dtype in _UNSIGNED and other.dtype == self.dtype:
        return op.BitShift(self, other, direction="LEFT")
    return core.aten_bitwise_left_shift(self, other)


def log_sigmoid(self: Any) -> Any:
    """aten.log_sigmoid: min(x, 0) - log(1 + exp(-|x|)), which is finite where the sigmoid is rounded to zero."""
    near = op.Log(op.Add(op.Exp(op.Neg(op.Abs(self))), like(1, self)))
    return op.Sub(op.Min(self, like(0, self)), near)


def power(self: Any, exponent: Any) -> Any:
    """aten.pow.Tensor_Tensor: in the type that PyTorch promotes both to, where torch.onnx takes that of the base."""
    if _outranks(exponent, self):
        self = op.Cast(self, to=exponent.dtype)
    return core.aten_pow(self, exponent)


def _outranks(first: Any, second: Any) -> bool:
    """Whether the type of the first is that of both together; a number's width does not count beside a tensor."""
    kinds = [bool(each.dtype.is_floating_point()) for each in (first, second)]
    if kinds[0] != kinds[1]:
        return kinds[0]
    return bool(first.dtype.bitwidth > second.dtype.bitwidth) and (len(first.shape) > 0 or len(second.shape) == 0)


def remainder(self: Any, other: Any) -> Any:
    """aten.remainder: what is left of the quotient that is rounded down, exactly."""
    self, other = _tensors(self, other)
    if self.dtype.is_integer():
        return core.aten_remainder(self, other)
    rest, is_below = _rest(self, other)
    return op.Where(is_below, op.Add(rest, other), rest)


def floor_divide(self: Any, other: Any) -> Any:
    """aten.floor_divide: rounded down from the exact quotient, not from that which was rounded to a number."""
    self, other = _tensors(self, other)
    if self.dtype.is_integer():
        return core.aten_floor_divide(self, other)
    rest, is_below = _rest(self, other)
    whole = op.Div(op.Sub(self, rest), other)
    whole = op.Round(op.Where(is_below, op.Sub(whole, like(1, self)), whole))
    return op.Where(op.Equal(other, like(0, self)), op.Div(self, other), whole)


def divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """aten.div.Tensor_mode: of integers without a detour by float32."""
    self, other = _tensors(self, other)
    if rounding_mode == "floor":
        return floor_divide(self, other)
    if rounding_mode == "trunc" and self.dtype.is_integer():
        return op.Div(self, other)
    return core.aten_div_mode(self, other, rounding_mode)


def _tensors(self: Any, other: Any) -> list[Any]:
    """Both operands, a number as a tensor of the other's type."""
    typed = other if isinstance(self, int | float) else self
    return [described(like(x, typed), [], typed) if isinstance(x, int | float) else x for x in (self, other)]


def _rest(self: Any, other: Any) -> tuple[Any, Any]:
    """What is left of the quotient that is rounded towards zero, and whether that is above the one rounded down."""
    zero = like(0, self)
    rest = op.Mod(self, other, fmod=1)
    differ = op.Not(op.Equal(op.Less(rest, zero), op.Less(other, zero)))
    return rest, op.And(op.Not(op.Equal(rest, zero)), differ)


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """aten.scatter_reduce.two: without its own elements, it begins with what changes no result."""
    if not len(self.shape):
        axes = ints([0])
        self, index, src = (described(op.Unsqueeze(each, axes), [1], each) for each in (self, index, src))
        return op.Squeeze(scatter_reduce(self, 0, index, src, reduce, include_self), axes)
    rows = op.Shape(index)
    if not include_self:
        begin = op.Expand(like(_NEUTRAL[reduce](self.dtype.numpy()), self), rows)
        self = described(op.ScatterElements(self, index, begin, axis=dim), self.shape, self)
    if reduce != "mean":
        return core.aten_scatter_reduce(self, dim, index, src, reduce)
    one = like(1, self)
    own = op.Expand(like(int(include_self), self), op.Shape(self))
    counts = op.ScatterElements(own, index, op.Expand(one, rows), axis=dim, reduction="add")
    total = op.ScatterElements(self, index, src, axis=dim, reduction="add")
    total, counts = (described(each, self.shape, self) for each in (total, op.Max(counts, one)))
    return op.Div(total, counts) if self.dtype.is_floating_point() else core.aten_floor_divide(total, counts)


def lstm(
    x: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """aten.lstm.input without projections of its hidden state, which ONNX's LSTM lacks."""
    if len(params) != num_layers * (1 + bidirectional) * (4 if has_biases else 2):
        raise UnsupportedModelError("ONNX's LSTM has no projection (proj_size): compile for --target cuda")
    return core.aten_lstm(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


COMMON: dict[Any, Any] = {
    **LOSSES,
    **POOLING,
    **RESIZING,
    aten.scaled_dot_product_attention.default: attention,
    aten.matmul.default: matmul,
    aten.mv.default: matmul,
    aten.lstm.input: lstm,
    aten.__rshift__.Scalar: shift_right,
    aten.bitwise_right_shift.Tensor_Scalar: shift_right,
    aten.bitwise_right_shift.Tensor: shift_right_by,
    aten.__rshift__.Tensor: shift_right_by,
    aten.__lshift__.Scalar: shift_left,
    aten.__lshift__.Tensor: shift_left_by,
    aten.bitwise_left_shift.Tensor_Scalar: shift_left,
    aten.bitwise_left_shift.Tensor: shift_left_by,
    aten.log_sigmoid.default: log_sigmoid,
    aten.pow.Tensor_Tensor: power,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.floor_divide.default: floor_divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.scatter_reduce.two: scatter_reduce,
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
    places = op.Expand(op.Reshape(positions, ints([*[1] * dim, count, 1])), ints([*lead, 1]))
    if dim:
        grid = np.moveaxis(np.indices(lead)[:dim], 0, -1).astype(np.int64)
        places = op.Concat(op.Constant(value=numpy_helper.from_array(grid)), places, axis=-1)
    return op.ScatterND(self, places, source)


def _folded(value: Any) -> Any:
    """All axes but the last three as one."""
    shape = _shape(value)
    folded = [prod(shape[:-3]), *shape[-3:]]
    return described(op.Reshape(value, ints(folded)), folded, value)


def _shape(value: Any) -> list[int]:
    return [int(size) for size in value.shape]


def _number(value: float, other: Any) -> Any:
    constant: Any = op.Constant(value_float=value)
    return op.CastLike(constant, other)
