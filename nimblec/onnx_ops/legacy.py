"""Opset 6 where it differs from opset 7: attributes control broadcasting."""

from collections.abc import Callable

import torch
from torch import Tensor

from nimblec.onnx_ops import arithmetic, linear
from nimblec.onnx_ops.axes import along, axis_of
from nimblec.onnx_ops.normalization import batch_normalization_7
from nimblec.onnx_ops.table import Refused, op


def _aligned(a: Tensor, b: Tensor, axis: int | None, broadcast: int) -> Tensor:
    """Return ``b`` with its dimensions from ``axis`` of ``a`` on; the last ones by default."""
    if not broadcast:
        if a.shape != b.shape:
            raise Refused(f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ without attribute 'broadcast'")
        return b
    start = a.dim() - b.dim() if axis is None else axis_of(axis, a.dim())
    if start < 0 or start + b.dim() > a.dim():
        raise Refused(f"shape {tuple(b.shape)} does not fit {tuple(a.shape)} from axis {start}")
    return b.reshape([*b.shape, *[1] * (a.dim() - start - b.dim())])


def _enter(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    @op(name, since=6 if name in ("Add", "Sub", "Mul", "Div") else 1)
    def binary(a: Tensor, b: Tensor, *, axis: int | None = None, broadcast: int = 0) -> Tensor:
        return function(a, _aligned(a, b, axis, broadcast))


for _name in ("Add", "And", "Equal", "Greater", "Less", "Mul", "Or", "Sub", "Xor"):
    _enter(_name, arithmetic.BINARY[_name][1])
_enter("Div", arithmetic.divide)
_enter("Pow", arithmetic.power)


@op("Gemm", since=6)
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    return linear.gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@op("PRelu", since=6)
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    factor = slope.reshape(()) if slope.numel() == 1 else along(slope, 1, x.dim())
    return torch.where(x < 0, x * factor, x)


@op("BatchNormalization", since=6)
def batch_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 9.999999747378752e-06,
    is_test: int = 0,
    momentum: float = 0.8999999761581421,
    spatial: int = 1,
) -> Tensor:
    if not is_test:
        raise Refused(f"attribute 'is_test' is {is_test}; expected 1")
    return batch_normalization_7(x, scale, b, mean, var, epsilon=epsilon, spatial=spatial)
