"""Pooling that torch.onnx exports wrongly, into what a plan cannot hold, or not at all.

It ignores the divisor of an average pool, and has no adaptive maxima. Bags of embeddings become a loop over a sequence
of tensors; here their rows are scattered into sums, means or maxima.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir
import torch
from onnx import numpy_helper
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_export.constants import ints, like, numbers_below, size

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
    """Translate aten._embedding_bag of indices (L,) and offsets of bags (B,), or (B + 1,) with the end of the last."""
    zero, one, axis = like(0, weight), like(1, weight), ints([1])
    bags = op.Unsqueeze(_bags(indices, offsets), axis)
    rows = op.Gather(weight, indices)
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(per_sample_weights, axis))
    padding = -1 if padding_idx is None else padding_idx
    is_counted = op.Unsqueeze(op.Not(op.Equal(indices, like(padding, indices))), axis)
    if include_last_offset:
        offsets = op.Slice(offsets, ints([0]), ints([-1]), ints([0]))
        count = op.Shape(offsets)
        is_counted = op.And(is_counted, op.Less(bags, count))
        bags = op.Min(bags, op.Sub(count, ints([1])))
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
    """Return the number of the bag of each index (L,): how many bags begin there or before, less one."""
    zero, one = ints([0]), ints([1])
    places = op.CastLike(numbers_below(op.Shape(indices)), offsets)
    begun = op.GreaterOrEqual(op.Unsqueeze(places, one), op.Unsqueeze(offsets, zero))
    counts: Any = op.Cast(begun, to=onnx_ir.DataType.INT64)
    return op.Sub(op.ReduceSum(counts, one, keepdims=0), one)


def _average(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a translation by ``plain``, which ignores ``divisor_override``."""

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


def adaptive_maximum(axes: int, self: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """Translate aten.adaptive_max_pool of the last ``axes``: maxima, and the elements that they are."""
    elements, _ = _adaptive_windows([size(self, axis) for axis in range(-axes, 0)], output_size)
    windows = _gathered(axes, self, elements)
    count, most = elements.shape
    chosen: Any = op.Add(op.ArgMax(windows, axis=-1, keepdims=0), ints(range(0, count * most, most)))
    numbers: Any = ints(elements.flatten().tolist())
    places = op.Gather(numbers, chosen)
    shape = ints([*[0] * (len(self.shape) - axes), *output_size])  # 0: as it is
    return op.Reshape(op.ReduceMax(windows, ints([-1]), keepdims=0), shape), op.Reshape(places, shape)


def adaptive_mean(axes: int, self: Any, output_size: Sequence[int]) -> Any:
    """Translate aten._adaptive_avg_pool of the last ``axes``."""
    elements, shares = _adaptive_windows([size(self, axis) for axis in range(-axes, 0)], output_size)
    sums = op.ReduceSum(op.Mul(_gathered(axes, self, elements), like(shares, self)), ints([-1]), keepdims=0)
    return op.Reshape(sums, ints([*[0] * (len(self.shape) - axes), *output_size]))


def _gathered(axes: int, self: Any, elements: np.ndarray) -> Any:
    """Return the elements of each window (..., windows, elements), the last ``axes`` counted as one."""
    flat = op.Reshape(self, ints([*[0] * (len(self.shape) - axes), -1]))
    places: Any = op.Constant(value=numpy_helper.from_array(elements))
    return op.Gather(flat, places, axis=-1)


def _adaptive_windows(sizes: Sequence[int], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of each window, and their shares of its mean (windows, elements).

    Shorter windows repeat their last element, with a share of 0.
    """
    elements, shares = np.zeros((1, 1), np.int64), np.ones((1, 1))
    for length, count in zip(sizes, counts, strict=True):
        starts = np.arange(count) * length // count
        ends = -(-np.arange(1, count + 1) * length // count)
        lengths = (ends - starts)[:, None]
        offsets = np.arange(lengths.max())
        along = starts[:, None] + np.minimum(offsets, lengths - 1)
        joined = len(elements) * count, -1
        elements = (elements[:, None, :, None] * length + along[None, :, None, :]).reshape(joined)
        shares = (shares[:, None, :, None] * ((offsets < lengths) / lengths)[None, :, None, :]).reshape(joined)
    return elements, shares


POOLING: dict[Any, Any] = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
    aten.avg_pool2d.default: _average(nn.aten_avg_pool2d),
    aten.avg_pool3d.default: _average(nn.aten_avg_pool3d),
    aten._adaptive_avg_pool3d.default: partial(adaptive_mean, 3),
    aten.adaptive_max_pool2d.default: partial(adaptive_maximum, 2),
    aten.adaptive_max_pool3d.default: partial(adaptive_maximum, 3),
}
"""Translations for torch.onnx.export of any model."""
