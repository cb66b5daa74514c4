"""Losses."""

import torch
from torch import Tensor

from nimblec.onnx_ops.axes import zero_like
from nimblec.onnx_ops.table import Refused, op


@op("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    if reduction not in ("none", "sum", "mean"):
        raise Refused(f"attribute 'reduction' is {reduction!r}; expected none, sum or mean")
    label = target.to(torch.int64)
    ignored = None if ignore_index is None else label == ignore_index
    if ignored is not None:
        label = torch.where(ignored, zero_like(label), label)
    loss = -torch.gather(input, 1, label.unsqueeze(1)).squeeze(1)
    factor = None
    if weight is not None:
        factor = torch.index_select(weight, 0, label.reshape(-1)).reshape(label.shape)
        loss = loss * factor
    if ignored is not None:
        loss = torch.where(ignored, zero_like(input), loss)  # a factor of 0 would leave infinite ones as NaN
    if reduction == "none":
        return loss
    if reduction == "sum":
        return torch.sum(loss)
    if ignored is not None:
        ones = torch.ones((), dtype=input.dtype) if factor is None else factor
        factor = torch.where(ignored, zero_like(input), ones)
    return torch.mean(loss) if factor is None else torch.sum(loss) / torch.sum(factor)


@op("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, 1)
    loss = negative_log_likelihood(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss, log_prob
