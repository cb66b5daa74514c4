"""Fused operators of ONNX Runtime (com.microsoft) in floating point."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.onnx_ops.axes import axis_of
from nimblec.onnx_ops.convolution import Geometry, convolution
from nimblec.onnx_ops.creation import triangle
from nimblec.onnx_ops.linear import float_matmul, gemm
from nimblec.onnx_ops.normalization import layer_normalization, rms_normalization
from nimblec.onnx_ops.shape import unsqueeze
from nimblec.onnx_ops.table import MICROSOFT, Floats, Refused, op
from nimblec.onnx_ops.vision import grid_sample

EPSILON = 9.999999960041972e-13

op("GridSample", domain=MICROSOFT)(grid_sample)
op("Trilu", domain=MICROSOFT)(triangle)


@op("Gelu", domain=MICROSOFT)
def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


@op("BiasGelu", domain=MICROSOFT)
def bias_gelu(a: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(a + b)


@op("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


@op("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.7020000219345093) -> Tensor:
    return x * torch.sigmoid(alpha * x)


@op("ExpandDims", domain=MICROSOFT)
def expand_dims(x: Tensor, axis: int) -> Tensor:
    return unsqueeze(x, (axis_of(axis, x.dim() + 1),))


@op("Inverse", domain=MICROSOFT)
def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv_ex(x).inverse  # without a check of the values


@op("FusedMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    if transBatchA or transBatchB:
        raise Refused("transBatchA and transBatchB are not supported; expected 0")
    left = a.transpose(-1, -2) if transA and a.dim() > 1 else a
    right = b.transpose(-1, -2) if transB and b.dim() > 1 else b
    product = float_matmul(left, right)
    return product if alpha == 1 else product * alpha


FUSED_ACTIVATIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "": (0, lambda x: x),
    "Relu": (0, torch.relu),
    "Tanh": (0, torch.tanh),
    "Sigmoid": (0, torch.sigmoid),
    "LeakyRelu": (1, functional.leaky_relu),
    "Clip": (2, torch.clamp),
    "HardSigmoid": (2, lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1)),
    "Elu": (1, functional.elu),
    "Selu": (3, lambda x, alpha, _, gamma: gamma * functional.elu(x, alpha)),
    "Softplus": (0, functional.softplus),
    "Softsign": (0, functional.softsign),
    "ThresholdedRelu": (1, lambda x, alpha: torch.where(x > alpha, x, 0)),
}
"""Activations that may be fused into a product, with the number of their parameters."""


def activated(x: Tensor, activation: str, parameters: Floats) -> Tensor:
    """Apply the activation that is fused into a product; raise `Refused` for unknown ones."""
    count, function = FUSED_ACTIVATIONS.get(activation, (0, None))
    if function is None or len(parameters) < count:
        raise Refused(f"activation {activation!r} with parameters {parameters} is not supported")
    return function(x, *parameters[:count])


@op("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float = 0.0,
    activation_beta: float = 0.0,
    activation_gamma: float = 0.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(y, activation, (activation_alpha, activation_beta, activation_gamma))


@op("FusedConv", domain=MICROSOFT)
def fused_convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Floats = (),
    geometry: Geometry,
) -> Tensor:
    y = convolution(x, w, b, geometry=geometry)
    return activated(y if z is None else y + z, activation, activation_params)


@op("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 9.999999747378752e-06, stash_type: int = 1
) -> Tensor:
    return rms_normalization(x, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)


@op("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = EPSILON,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x + skip if bias is None else x + skip + bias
    y, mean, inverse_deviation = layer_normalization(total, gamma, beta, epsilon=epsilon)
    return y, mean, inverse_deviation, total


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = EPSILON
) -> tuple[Tensor, None, None, Tensor]:
    total = x + skip if bias is None else x + skip + bias
    return rms_normalization(total, gamma, epsilon=epsilon), None, None, total


@op("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = EPSILON,
    mask_index_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = input_ids.shape[1]
    total = functional.embedding(input_ids.to(torch.int64), word_embedding)
    if position_ids is None:
        total = total + position_embedding.narrow(0, 0, tokens)
    else:
        total = total + functional.embedding(position_ids.to(torch.int64), position_embedding)
    if segment_ids is not None and segment_embedding is not None:
        total = total + functional.embedding(segment_ids.to(torch.int64), segment_embedding)
    lengths = torch.zeros(input_ids.shape[0], dtype=torch.int32)
    if mask is not None:
        lengths = torch.sum(mask, 1, dtype=torch.int32)
    return layer_normalization(total, gamma, beta, epsilon=epsilon)[0], lengths, total
