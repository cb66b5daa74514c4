"""Translations for what torch.onnx exports wrongly, slowly or not at all.

Batch norm in training mode is written out: torch.onnx exports it as if it were in evaluation mode. Attention of other
than four axes it refuses, and where a mask leaves no key it computes a mean or NaN. Of a transposed matrix and a
vector, ONNX Runtime 1.32 computes another product.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, nn
from torch.onnx._internal.exporter._torchlib.ops.hop import higher_order_scan

from nimblec.onnx_export.arithmetic import ARITHMETIC
from nimblec.onnx_export.axes import ALONG_AXES
from nimblec.onnx_export.constants import described, ints, like, sizes
from nimblec.onnx_export.indexing import INDEXING, ROWS
from nimblec.onnx_export.losses import LOSSES
from nimblec.onnx_export.pooling import POOLING
from nimblec.onnx_export.recurrent import RECURRENT
from nimblec.onnx_export.resizing import RESIZING

aten = torch.ops.aten

_ATTENTION_AXES = 4


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
    """Translate aten._native_batch_norm_legit_functional: normalised values, saved statistics, new statistics."""
    if not training:
        return core.aten__native_batch_norm_legit_functional(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
    shape = sizes(x)
    others = [axis for axis in range(len(shape)) if axis != 1]
    along = ints([1, shape[1], *[1] * (len(shape) - 2)])
    mean = op.ReduceMean(x, ints(others))
    centred = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(centred, centred), ints(others))
    scale = op.Reciprocal(op.Sqrt(op.Add(var, like(eps, x))))
    y = op.Mul(centred, scale)
    if weight is not None:
        y = op.Mul(y, op.Reshape(weight, along))
    if bias is not None:
        y = op.Add(y, op.Reshape(bias, along))
    flat = ints([shape[1]])
    mean, var, scale = (op.Reshape(value, flat) for value in (mean, var, scale))
    count = prod(shape[axis] for axis in others)
    unbiased = op.Mul(var, like(count / max(count - 1, 1), x))
    moved = (
        op.Add(op.Mul(old, like(1 - momentum, old)), op.Mul(new, like(momentum, x)))
        for old, new in ((running_mean, mean), (running_var, unbiased))
    )
    return y, mean, scale, *moved


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *given: Any, **named: Any) -> Any:
    """Translate aten.scaled_dot_product_attention; a row whose mask leaves no key is zero."""
    made = _attention(query, key, value, attn_mask, *given, **named)
    if attn_mask is None:
        return made
    last, zero = ints([-1]), like(0, query)
    if attn_mask.dtype == onnx_ir.DataType.BOOL:
        attn_mask = op.Where(attn_mask, zero, like(-np.inf, query))
    has_key = op.Greater(op.ReduceMax(attn_mask, last), like(-np.inf, query))
    return op.Where(has_key, made, zero)


def _attention(query: Any, key: Any, value: Any, attn_mask: Any, *given: Any, **named: Any) -> Any:
    """Attend over any number of axes, of which torch.onnx takes four."""
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
    """Translate aten.matmul and aten.mv with a vector as a column: ONNX Runtime fuses a transposed matrix wrongly."""
    if len(other.shape) != 1 or len(self.shape) == 1:
        return core.aten_matmul(self, other)
    last = ints([-1])
    return op.Squeeze(op.MatMul(self, op.Unsqueeze(other, last)), last)


def map_rows(body: Any, rows: Sequence[Any], others: Sequence[Any]) -> Any:
    """Translate higher_order.map_impl as a scan that carries nothing."""
    return higher_order_scan(body, (), rows, others)


COMMON: dict[Any, Any] = {
    **ALONG_AXES,
    **ARITHMETIC,
    **INDEXING,
    **LOSSES,
    **POOLING,
    **RECURRENT,
    **RESIZING,
    aten.scaled_dot_product_attention.default: attention,
    aten.matmul.default: matmul,
    aten.mv.default: matmul,
    torch.ops.higher_order.map_impl: map_rows,
    aten._is_all_true.default: core.aten_all,
    aten._is_any_true.default: core.aten_any,
}
"""For any model."""

TRANSLATIONS: dict[Any, Any] = {
    **COMMON,
    **ROWS,
    aten._native_batch_norm_legit_functional.default: batch_norm,
}
"""For models with state."""


def _folded(value: Any) -> Any:
    """Return all axes but the last three as one."""
    shape = sizes(value)
    folded = [prod(shape[:-3]), *shape[-3:]]
    return described(op.Reshape(value, ints(folded)), folded, value)
