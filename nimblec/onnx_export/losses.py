"""The cross entropy that torch.onnx exports wrongly, or not at all.

It ignores label smoothing, and writes probabilities and single rows as ONNX's operator, which takes neither.
"""

from typing import Any

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import nn

from nimblec.onnx_export.constants import described, ints, like, numbers_below, unsqueezed

_NONE, _MEAN, _SUM = range(3)
"""ATen's enum of reductions."""


def cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Translate aten.cross_entropy_loss, of numbers of classes or of their probabilities."""
    if len(self.shape) == 1:
        axis = ints([0])
        self, target = (described(op.Unsqueeze(each, axis), [1, *each.shape], each) for each in (self, target))
        loss = cross_entropy(self, target, weight, reduction, ignore_index, label_smoothing)
        return op.Squeeze(loss, axis) if reduction == _NONE else loss
    if not target.dtype.is_integer():
        rows = _entropies(self, target, weight, label_smoothing)
        return _reduced(rows, op.CastLike(op.Size(rows), self), reduction)
    if not label_smoothing:
        return nn.aten_cross_entropy_loss(self, target, weight, reduction, ignore_index)
    chosen = _one_hot(target, self)
    is_kept = op.Not(op.Equal(target, like(ignore_index, target)))
    counts = op.CastLike(is_kept, self) if weight is None else _summed(op.Mul(chosen, _along_classes(weight, self)))
    rows, counts = (
        op.Where(is_kept, each, like(0, self)) for each in (_entropies(self, chosen, weight, label_smoothing), counts)
    )
    return _reduced(rows, op.ReduceSum(counts, keepdims=0), reduction)


def _entropies(scores: Any, probabilities: Any, weight: Any, label_smoothing: float) -> Any:
    """Return the entropy of each row of classes."""
    if label_smoothing:
        classes = op.CastLike(op.Shape(scores, start=1, end=2), scores)
        even = op.Div(like(label_smoothing, scores), classes)
        probabilities = op.Add(op.Mul(probabilities, like(1 - label_smoothing, scores)), even)
    if weight is not None:
        probabilities = op.Mul(probabilities, _along_classes(weight, scores))
    return op.Neg(_summed(op.Mul(op.LogSoftmax(scores, axis=1), probabilities)))


def _one_hot(target: Any, scores: Any) -> Any:
    numbers = numbers_below(op.Shape(scores, start=1, end=2))
    is_chosen = op.Equal(op.Unsqueeze(target, ints([1])), _along_classes(numbers, scores))
    return op.CastLike(is_chosen, scores)


def _along_classes(values: Any, scores: Any) -> Any:
    """Return a value for each class, to be broadcast to the scores."""
    return unsqueezed(values, range(1, len(scores.shape) - 1))


def _summed(values: Any) -> Any:
    return op.ReduceSum(values, ints([1]), keepdims=0)


def _reduced(rows: Any, count: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return rows
    total = op.ReduceSum(rows, keepdims=0)
    return total if reduction == _SUM else op.Div(total, count)


LOSSES: dict[Any, Any] = {torch.ops.aten.cross_entropy_loss.default: cross_entropy}
"""Translations for torch.onnx.export of any model."""
