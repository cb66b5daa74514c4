"""Pooling that torch.onnx exports wrongly, or into what a plan cannot hold.

It ignores the divisor of an average pool. Bags of embeddings become a loop over a sequence of tensors; here their rows
are scattered into sums, means or maxima.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.pytorch.onnx_constants import ints, like, numbers_below

aten = torch.ops.aten

_MEAN, _MAX = 1, 2
"""Modes of ATen's embedding_bag; the sum is 0."""


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    _scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """aten._embedding_bag of indices (L,) and the offsets of its bags (B,),."""
    zero, one, axis = like(0, weight), like(1, weight), ints([1])
    if include_last_offset:
        offsets = op.Slice(offsets, ints([0]), ints([-1]), ints([0]))
    bags = op.Unsqueeze(_bags(indices, offsets), axis)
    rows = op.Gather(weight, indices)
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, axis))
    padding = -1 if padding_idx is None else padding_idx
    is_counted = op.Unsqueeze(op.Not(op.Equal(indices, like(padding, indices))), axis)
    nothing = like(-np.inf, weight) if mode == _MAX else zero
    shape = op.Concat(op.Shape(offsets), op.Shape(weight, start=1, end=2), axis=0)
    made = op.ScatterElements(
        op.Expand(nothing, shape),
        op.Expand(bags, op.Shape(rows)),
        op.Where(is_counted, rows, nothing),
        axis=0,
        reduction="max" if mode == _MAX else "add",
    )
    if mode in (_MEAN, _MAX):
        none = op.Unsqueeze(op.Expand(zero, op.Shape(offsets)), axis)
        counts = op.ScatterElements(none, bags, op.CastLike(is_counted, weight), axis=0, reduction="add")
        made = op.Div(made, op.Max(counts, one)) if mode == _MEAN else op.Where(op.Equal(counts, zero), zero, made)
    return made, *(op.Identity(offsets) for _ in range(3))  # for a gradient: not computed


def _bags(indices: Any, offsets: Any) -> Any:
    """Of each index the number of its bag (L,): how many bags begin there or before, less one."""
    zero, one = ints([0]), ints([1])
    places = op.CastLike(numbers_below(op.Shape(indices)), offsets)
    begun = op.GreaterOrEqual(op.Unsqueeze(places, one), op.Unsqueeze(offsets, zero))
    counts: Any = op.Cast(begun, to=onnx_ir.DataType.INT64)
    return op.Sub(op.ReduceSum(counts, one, keepdims=0), one)


def _average(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A translation by ``plain``, which ignores ``divisor_override``."""

    def translated(
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return plain(self, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise UnsupportedModelError("an average pool with divisor_override and ceil_mode: set one of them only")
        whole = plain(self, kernel_size, stride, padding)
        return op.Mul(whole, like(prod(kernel_size) / divisor_override, self))

    return translated


POOLING: dict[Any, Any] = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
    aten.avg_pool2d.default: _average(nn.aten_avg_pool2d),
    aten.avg_pool3d.default: _average(nn.aten_avg_pool3d),
}
"""Translations for torch.onnx.export of any model."""
