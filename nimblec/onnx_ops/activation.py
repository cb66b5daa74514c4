"""Activations."""

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.onnx_ops.axes import axis_of, zero_like
from nimblec.onnx_ops.table import Refused, op


@op("Softsign")
def softsign(x: Tensor) -> Tensor:
    return x / (1 + torch.abs(x))


@op("LeakyRelu")
def leaky_relu(x: Tensor, *, alpha: float = 0.009999999776482582) -> Tensor:
    return functional.leaky_relu(x, alpha)


@op("PRelu", since=7)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    if not x.dtype.is_signed:
        return x
    return torch.where(x < 0, x * slope, x)


@op("Elu")
def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.elu(x, alpha)


@op("Celu", since=12)
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.celu(x, alpha)


@op("Selu")
def selu(x: Tensor, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Tensor:
    return torch.ops.aten.elu(x, alpha, gamma)


@op("ThresholdedRelu", since=10)
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, zero_like(x))


@op("HardSigmoid")
def hard_sigmoid(x: Tensor, *, alpha: float = 0.20000000298023224, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


@op("Gelu", since=20)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate not in ("none", "tanh"):
        raise Refused(f"attribute 'approximate' is {approximate!r}; expected none or tanh")
    return functional.gelu(x, approximate=approximate)


@op("Swish", since=24)
def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


@op("SwiGLU", since=28)
def swiglu(a: Tensor, b: Tensor, *, alpha: float = 1.0) -> Tensor:
    return swish(a, alpha=alpha) * b


@op("Shrink", since=9)
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, zero_like(x))).to(x.dtype)


def _as_matrix(x: Tensor, axis: int) -> Tensor:
    """Return ``x`` with the dimensions from ``axis`` on as one, as opsets below 13 see it."""
    axis = axis_of(axis, x.dim())
    return torch.reshape(x, (torch.Size(x.shape[:axis]).numel(), torch.Size(x.shape[axis:]).numel()))


@op("Softmax")
def softmax_of_matrix(x: Tensor, *, axis: int = 1) -> Tensor:
    if axis in (-1, x.dim() - 1):
        return torch.softmax(x, -1)
    return torch.softmax(_as_matrix(x, axis), -1).reshape(x.shape)


@op("Softmax", since=13)
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@op("LogSoftmax")
def log_softmax_of_matrix(x: Tensor, *, axis: int = 1) -> Tensor:
    if axis in (-1, x.dim() - 1):
        return torch.log_softmax(x, -1)
    return torch.log_softmax(_as_matrix(x, axis), -1).reshape(x.shape)


@op("LogSoftmax", since=13)
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@op("Hardmax")
def hardmax_of_matrix(x: Tensor, *, axis: int = 1) -> Tensor:
    return hardmax(_as_matrix(x, axis)).reshape(x.shape)


@op("Hardmax", since=13)
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    largest = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, largest, 1.0)
