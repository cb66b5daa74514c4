"""Normalizations."""

import torch
from torch import Tensor

from nimblec.onnx_ops.axes import along, axes_of, axis_of, zero_like
from nimblec.onnx_ops.table import Ints, Node, Refused, op

aten = torch.ops.aten


@op("BatchNormalization", since=7)
def batch_normalization_7(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 9.999999747378752e-06,
    momentum: float = 0.8999999761581421,
    spatial: int = 1,
) -> Tensor:
    if spatial != 1:
        raise Refused(f"attribute 'spatial' is {spatial}; expected 1")
    return _normalize_batch(x, scale, b, mean, var, epsilon)


@op("BatchNormalization", since=9)
def batch_normalization_9(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    node: Node,
    epsilon: float = 9.999999747378752e-06,
    momentum: float = 0.8999999761581421,
) -> Tensor:
    if any(node.outputs[1:]):
        raise Refused("has the outputs of training; expected output 0 alone")
    return _normalize_batch(x, scale, b, mean, var, epsilon)


@op("BatchNormalization", since=14)
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    input_mean: Tensor,
    input_var: Tensor,
    *,
    epsilon: float = 9.999999747378752e-06,
    momentum: float = 0.8999999761581421,
    training_mode: int = 0,
) -> tuple[Tensor, ...]:
    if not training_mode:
        return (_normalize_batch(x, scale, b, input_mean, input_var, epsilon),)
    axes = [i for i in range(x.dim()) if i != 1]
    mean = torch.mean(x.to(input_mean.dtype), axes)
    var = torch.var(x.to(input_var.dtype), axes, correction=0)
    y = _normalize_batch(x, scale, b, mean, var, epsilon)
    return y, _moved(input_mean, mean, momentum), _moved(input_var, var, momentum)


def _moved(running: Tensor, current: Tensor, momentum: float) -> Tensor:
    return running * momentum + current * (1 - momentum)


def _normalize_batch(x: Tensor, scale: Tensor, b: Tensor, mean: Tensor, var: Tensor, epsilon: float) -> Tensor:
    if not scale.dtype == b.dtype == mean.dtype == var.dtype:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale, b, mean, var = (parameter.to(wide) for parameter in (scale, b, mean, var))
    if x.dim() > 1 and scale.dtype in (x.dtype, torch.float32):
        return aten._native_batch_norm_legit_no_training(x, scale, b, mean, var, 0.1, epsilon)[0]
    rank = x.dim()
    factor = scale / torch.sqrt(var + epsilon)
    offset = b - mean * factor
    return (x * along(factor, 1, rank) + along(offset, 1, rank)).to(x.dtype)


@op("InstanceNormalization", since=6)
def instance_normalization(
    x: Tensor, scale: Tensor, b: Tensor, *, epsilon: float = 9.999999747378752e-06
) -> Tensor:
    return _normalize_groups(x, scale, b, x.shape[1], epsilon)


def _normalize_groups(x: Tensor, scale: Tensor, b: Tensor, groups: int, epsilon: float) -> Tensor:
    n, c = x.shape[:2]
    if groups < 1 or c % groups:
        raise Refused(f"{c} channels do not make {groups} groups")
    # torch's operator refuses other layouts.
    whole = x.contiguous()
    return aten.native_group_norm(whole, scale, b, n, c, torch.Size(x.shape[2:]).numel(), groups, epsilon)[0]


@op("GroupNormalization", since=18)
def group_normalization_by_group(
    x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 9.999999747378752e-06, num_groups: int
) -> Tensor:
    each = x.shape[1] // num_groups
    return _normalize_groups(
        x, scale.repeat_interleave(each), bias.repeat_interleave(each), num_groups, epsilon
    )


@op("GroupNormalization", since=21)
def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 9.999999747378752e-06,
    num_groups: int,
    stash_type: int = 1,
) -> Tensor:
    return _normalize_groups(x, scale, bias, num_groups, epsilon)


@op("LayerNormalization")  # ONNX Runtime's optimiser writes it below opset 17 too
def layer_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 9.999999747378752e-06,
    stash_type: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    if stash_type != 1:
        raise Refused(f"attribute 'stash_type' is {stash_type}; expected 1 (float)")
    first = axis_of(axis, x.dim())
    sizes = list(x.shape[first:])
    weight = _as_shape(scale, sizes)
    y, mean, inverse = aten.native_layer_norm(x, sizes, weight, None if b is None else _as_shape(b, sizes), epsilon)
    return y, mean.to(torch.float32), inverse.to(torch.float32)


def _as_shape(parameter: Tensor, sizes: list[int]) -> Tensor:
    return parameter if list(parameter.shape) == sizes else parameter.expand(sizes)


@op("RMSNormalization", since=23)
def rms_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 9.999999747378752e-06, stash_type: int = 1
) -> Tensor:
    if stash_type != 1:
        raise Refused(f"attribute 'stash_type' is {stash_type}; expected 1 (float)")
    axes = list(range(axis_of(axis, x.dim()), x.dim()))
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    inverse = torch.rsqrt(torch.mean(wide * wide, axes, keepdim=True) + epsilon)
    return ((wide * inverse).to(x.dtype) * scale).to(scale.dtype)


@op("LRN")
def local_response_normalization(
    x: Tensor,
    *,
    alpha: float = 9.999999747378752e-05,
    beta: float = 0.75,
    bias: float = 1.0,
    size: int,
) -> Tensor:
    square = (x * x).reshape([x.shape[0], 1, x.shape[1], -1])
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    padded = torch.nn.functional.pad(square, (0, 0, before, after))
    mean = aten.avg_pool2d(padded, [size, 1], [1, 1])
    return x / (bias + alpha * mean.reshape(x.shape)) ** beta


@op("LpNormalization")
def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    if p not in (1, 2):
        raise Refused(f"attribute 'p' is {p}; expected 1 or 2")
    norm = torch.linalg.vector_norm(x, p, axis_of(axis, x.dim()), keepdim=True)
    return torch.where(norm == 0, zero_like(x), x / norm)


@op("MeanVarianceNormalization", since=9)
def mean_variance_normalization(x: Tensor, *, axes: Ints = (0, 2, 3)) -> Tensor:
    chosen = list(axes_of(axes, x.dim()))
    centered = x - torch.mean(x, chosen, keepdim=True)
    deviation = torch.sqrt(torch.mean(centered * centered, chosen, keepdim=True))
    return centered / (deviation + 1e-9)
