"""ResNet-50 in JAX, with the weights of bench.models.resnet50.

Each callable returns (function, (weights, images)), the arrays being NumPy's. Images and activations are NHWC, and
batch norms are folded into the convolutions, in float32 and ahead of time: torch.compile's freezing does the same.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch import nn

from bench.models import resnet50

Weights: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]
"""Kernel and bias of each convolution (HWIO) and of the classifier (in, out), by its name in torch."""
Network: TypeAlias = tuple[Callable[..., Any], tuple[Weights, np.ndarray]]

_STAGES = (3, 4, 6, 3)
"""Bottleneck blocks."""


def logits(weights: Weights, images: jax.Array) -> jax.Array:
    """Map (batch, 224, 224, 3) to (batch, 1000) (He et al., 2016, with the stride in the 3x3 convolutions)."""
    x = jax.nn.relu(_convolution(weights["conv1"], images, 2))
    window = (1, 3, 3, 1)
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for stage, blocks in enumerate(_STAGES, start=1):
        for block in range(blocks):
            x = _bottleneck(weights, f"layer{stage}.{block}", x, 2 if stage > 1 and block == 0 else 1)
    kernel, bias = weights["fc"]
    return x.mean((1, 2), dtype=jnp.float32).astype(x.dtype) @ kernel + bias


def _bottleneck(weights: Weights, name: str, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(_convolution(weights[f"{name}.conv1"], x))
    y = jax.nn.relu(_convolution(weights[f"{name}.conv2"], y, stride))
    y = _convolution(weights[f"{name}.conv3"], y)
    if f"{name}.downsample.0" in weights:
        x = _convolution(weights[f"{name}.downsample.0"], x, stride)
    return jax.nn.relu(x + y)


def _convolution(weights: tuple[np.ndarray, np.ndarray], x: jax.Array, stride: int = 1) -> jax.Array:
    kernel, bias = weights
    padding = [(size // 2, size // 2) for size in kernel.shape[:2]]
    return (
        lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        + bias
    )


def folded(module: nn.Module) -> Weights:
    """Return the convolutions of a torch module, each with the batch norm registered after it folded in."""
    weights: Weights = {}
    convolution: tuple[str, nn.Conv2d] | None = None
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d):
            convolution = name, part
        elif isinstance(part, nn.BatchNorm2d):
            mean, variance = part.running_mean, part.running_var
            assert convolution is not None
            assert mean is not None
            assert variance is not None
            scale = part.weight / torch.sqrt(variance + part.eps)
            kernel = convolution[1].weight * scale[:, None, None, None]
            weights[convolution[0]] = _numpy(kernel.permute(2, 3, 1, 0)), _numpy(part.bias - mean * scale)
        elif isinstance(part, nn.Linear):
            weights[name] = _numpy(part.weight.T), _numpy(part.bias)
    return weights


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def fp32(batch: int = 1) -> Network:
    """Build the network in single precision."""
    module, _ = resnet50.fp32()
    images = torch.randn(batch, 3, 224, 224)
    return logits, (folded(module), _numpy(images.permute(0, 2, 3, 1)))


def fp16(batch: int = 1) -> Network:
    """Build the network in half precision."""
    function, arrays = fp32(batch)
    return function, jax.tree.map(lambda array: array.astype(np.float16), arrays)
