"""Quantized operators of ONNX Runtime (com.microsoft)."""

import torch
from torch import Tensor

from nimblec.onnx_ops.activation import softmax, softmax_of_matrix
from nimblec.onnx_ops.axes import axis_of
from nimblec.onnx_ops.convolution import Geometry
from nimblec.onnx_ops.integers import Quantized, product_of_integers
from nimblec.onnx_ops.linear import centered
from nimblec.onnx_ops.pooling import average_pool
from nimblec.onnx_ops.quantization import (
    convolution_quantized,
    dequantize,
    quantize,
    quantize_dynamically,
    saturated,
)
from nimblec.onnx_ops.table import MICROSOFT, Ints, Known, Refused, op


def _real(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Dequantize values of one scale, in single precision."""
    value = x.to(torch.float32)
    return (value if zero is None else value - zero.reshape(()).to(torch.float32)) * scale.reshape(())


def _quantized(x: Tensor, scale: Tensor, zero: Tensor | None, like: Tensor) -> Tensor:
    dtype = like.dtype if zero is None else zero.dtype
    return saturated(x / scale.reshape(()), None if zero is None else zero.reshape(()), dtype)


@op("QuantizeLinear", domain=MICROSOFT)
def quantize_microsoft(x: Tensor, y_scale: Tensor, y_zero_point: Tensor | None = None, *, axis: int = 1) -> Tensor:
    return quantize(x, y_scale, y_zero_point, axis=axis)


@op("DequantizeLinear", domain=MICROSOFT)
def dequantize_microsoft(x: Tensor, x_scale: Tensor, x_zero_point: Tensor | None = None, *, axis: int = 1) -> Tensor:
    return dequantize(x, x_scale, x_zero_point, axis=axis)


@op("QLinearAdd", domain=MICROSOFT)
def add_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor | None,
    c_scale: Tensor,
    c_zero_point: Tensor | None = None,
) -> Tensor:
    total = _real(a, a_scale, a_zero_point) + _real(b, b_scale, b_zero_point)
    return _quantized(total, c_scale, c_zero_point, a)


@op("QLinearMul", domain=MICROSOFT)
def multiply_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor | None,
    c_scale: Tensor,
    c_zero_point: Tensor | None = None,
) -> Tensor:
    product = _real(a, a_scale, a_zero_point) * _real(b, b_scale, b_zero_point)
    return _quantized(product, c_scale, c_zero_point, a)


@op("QLinearSigmoid", domain=MICROSOFT)
def sigmoid_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
) -> Tensor:
    return _quantized(torch.sigmoid(_real(x, x_scale, x_zero_point)), y_scale, y_zero_point, x)


@op("QLinearLeakyRelu", domain=MICROSOFT)
def leaky_relu_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    alpha: float = 0.009999999776482582,
) -> Tensor:
    y = torch.nn.functional.leaky_relu(_real(x, x_scale, x_zero_point), alpha)
    return _quantized(y, y_scale, y_zero_point, x)


@op("QLinearSoftmax", domain=MICROSOFT)
def softmax_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor,
    *,
    opset: int,
    axis: int = -1,
) -> Tensor:
    value = _real(x, x_scale, x_zero_point)
    y = softmax(value, axis=axis) if opset >= 13 else softmax_of_matrix(value, axis=axis)
    return _quantized(y, y_scale, y_zero_point, x)


@op("QLinearWhere", domain=MICROSOFT)
def where_quantized(
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    z_scale: Tensor,
    z_zero_point: Tensor,
) -> Tensor:
    chosen = torch.where(condition, _real(x, x_scale, x_zero_point), _real(y, y_scale, y_zero_point))
    return _quantized(chosen, z_scale, z_zero_point, x)


@op("QLinearConcat", domain=MICROSOFT)
def concatenate_quantized(y_scale: Tensor, y_zero_point: Tensor, *inputs: Tensor, axis: int) -> Tensor:
    if len(inputs) % 3:
        raise Refused(f"has {len(inputs)} inputs after the first two; expected groups of three")
    parts = [_real(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return _quantized(torch.cat(parts, axis_of(axis, parts[0].dim())), y_scale, y_zero_point, inputs[0])


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def global_average_pool_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    *,
    channels_last: int = 0,
) -> Tensor:
    axes = list(range(1, x.dim() - 1) if channels_last else range(2, x.dim()))
    mean = torch.mean(_real(x, x_scale, x_zero_point), axes, keepdim=True)
    return _quantized(mean, y_scale, y_zero_point, x)


@op("QLinearAveragePool", domain=MICROSOFT)
def average_pool_quantized(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: Ints,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    y = average_pool(
        _real(x.movedim(-1, 1) if channels_last else x, x_scale, x_zero_point),
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _quantized(y.movedim(1, -1) if channels_last else y, y_scale, y_zero_point, x)


@op("QLinearConv", domain=MICROSOFT)
def convolution_quantized_microsoft(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    b: Tensor | None = None,
    *,
    channels_last: int = 0,
    geometry: Geometry,
) -> Tensor:
    moved = x.movedim(-1, 1) if channels_last else x
    y = convolution_quantized(
        moved,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        b,
        geometry=geometry,
    )
    return y.movedim(1, -1) if channels_last else y


@op("QGemm", domain=MICROSOFT)
def gemm_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero_point: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    if y_scale is not None and y_zero_point is not None and alpha == 1:
        rows = Quantized(a.t() if transA else a, a_scale, a_zero_point)
        columns = Quantized(b if transB else b.t(), b_scale, b_zero_point)
        integers = product_of_integers(rows, columns, Quantized(None, y_scale, y_zero_point), c)
        if integers is not None:
            return integers
    left = centered(a.t() if transA else a, a_zero_point.reshape(()), -2)
    right = centered(b.t() if transB else b, b_zero_point.reshape(-1), -1)
    total = torch.mm(left, right)
    total = total if c is None else total + c.to(torch.float64)
    scale = alpha * a_scale.reshape(()) * b_scale.reshape(-1)
    y = total.to(torch.float32) * scale
    return y if y_scale is None else _quantized(y, y_scale, y_zero_point, a)


@op("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero_point: Tensor | None = None,
    b_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    product = torch.matmul(centered(a, a_zero_point, -2), centered(b, b_zero_point, -1))
    y = product.to(torch.float32) * (a_scale.reshape(()) * b_scale)
    return y if bias is None else y + bias


@op("DynamicQuantizeMatMul", domain=MICROSOFT)
def matmul_quantized_dynamically(
    a: Tensor, b: Tensor, b_scale: Tensor, b_zero_point: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    quantized, scale, zero = quantize_dynamically(a)
    return matmul_integer_to_float(quantized, b, scale, b_scale, zero, b_zero_point, bias)


@op("MatMulNBits", domain=MICROSOFT)
def matmul_of_few_bits(
    a: Tensor,
    b: Known,
    scales: Known,
    zero_points: Known | None = None,
    g_idx: Known | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Tensor:
    """Multiply by weights of 2, 4 or 8 bits, which are expanded to the dtype of ``a`` at import."""
    if bits not in (2, 4, 8) or g_idx is not None or weight_prepacked:
        raise Refused(f"bits {bits}, weight_prepacked {weight_prepacked} or input 'g_idx' is not supported")
    blocks = -(-K // block_size)
    weight = _unpacked(b.reshape(N, blocks, -1), bits).to(torch.float32)
    zero = torch.full((N, blocks), float(1 << (bits - 1)))
    if zero_points is not None and zero_points.dtype == torch.uint8:
        zero = _unpacked(zero_points.reshape(N, -1), bits).narrow(1, 0, blocks).to(torch.float32)
    elif zero_points is not None:
        zero = zero_points.reshape(N, blocks).to(torch.float32)
    scaled = (weight - zero.unsqueeze(2)) * scales.reshape(N, blocks, 1).to(torch.float32)
    matrix = scaled.reshape(N, -1).narrow(1, 0, K).to(a.dtype).t()
    rows = a.reshape(-1, K)
    y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
    return y.reshape([*a.shape[:-1], N])


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers packed into the bytes of the last axis, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32)
    numbers = (packed.to(torch.int32).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(*packed.shape[:-1], -1)
