"""Quantized integers: conversion from and to floating point, products of quantized tensors."""

import torch
from torch import Tensor

from nimblec.onnx_ops.axes import along, axis_of
from nimblec.onnx_ops.convolution import Geometry, convolution, padding_of
from nimblec.onnx_ops.creation import convert, dtype_of
from nimblec.onnx_ops.integers import Quantized, convolution_of_integers, product_of_integers
from nimblec.onnx_ops.linear import centered
from nimblec.onnx_ops.table import Refused, op
from nimblec.onnx_ops.unsigned import index_select

QUANTIZED = (torch.uint8, torch.int8, torch.uint16, torch.int16)


def spread(parameter: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Return a scale or zero point in a shape that broadcasts to ``x``: per tensor, axis or block."""
    if parameter.numel() == 1 and parameter.dim() < max(2, x.dim()):
        return parameter.reshape(())
    axis = axis_of(axis, x.dim())
    if not block_size:
        if parameter.dim() != 1 or parameter.shape[0] != x.shape[axis]:
            raise Refused(f"a scale of shape {tuple(parameter.shape)} does not fit axis {axis} of {tuple(x.shape)}")
        return along(parameter, axis, x.dim())
    blocks = -(-x.shape[axis] // block_size)
    expected = tuple(blocks if i == axis else length for i, length in enumerate(x.shape))
    if tuple(parameter.shape) != expected:
        raise Refused(f"a scale of shape {tuple(parameter.shape)}; expected {expected}")
    position = torch.arange(x.shape[axis]) // block_size
    return index_select(parameter, axis, position)


def saturated(x: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Round ``x`` to the nearest integer, ties to even, add the zero point and clamp to ``dtype``."""
    if dtype not in QUANTIZED:
        raise Refused(f"quantizes to {dtype}; expected one of {', '.join(str(d) for d in QUANTIZED)}")
    rounded = torch.round(x)
    if rounded.dtype in (torch.float16, torch.bfloat16):
        rounded = rounded.to(torch.float32)
    if zero_point is not None:
        rounded = rounded + zero_point.to(rounded.dtype)
    limits = torch.iinfo(dtype)
    return convert(torch.clamp(rounded, limits.min, limits.max), dtype)


@op("QuantizeLinear", since=10)
def quantize(
    x: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    dtype = torch.uint8 if y_zero_point is None else y_zero_point.dtype
    if output_dtype and y_zero_point is not None and dtype_of(output_dtype) != dtype:
        raise Refused(f"attribute 'output_dtype' is {dtype_of(output_dtype)}; the zero point is {dtype}")
    if output_dtype:
        dtype = dtype_of(output_dtype)
    scale = spread(y_scale, x, axis, block_size)
    work = dtype_of(precision) if precision else torch.promote_types(x.dtype, y_scale.dtype)
    zero = None if y_zero_point is None else spread(y_zero_point, x, axis, block_size)
    return saturated(x.to(work if work.is_floating_point else torch.float32) / scale.to(work), zero, dtype)


@op("DequantizeLinear", since=10)
def dequantize(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    value = x.to(torch.float32)
    if x_zero_point is not None:
        value = value - spread(x_zero_point.to(torch.float32), x, axis, block_size)
    scaled = value * spread(x_scale.to(torch.float32), x, axis, block_size)
    return scaled.to(dtype_of(output_dtype) if output_dtype else x_scale.dtype)


@op("DynamicQuantizeLinear", since=11)
def quantize_dynamically(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lowest = torch.clamp(torch.amin(x), max=0)
    scale = (torch.clamp(torch.amax(x), min=0) - lowest) / 255
    # The scale of zeros alone is 0.
    scale = torch.where(scale == 0, torch.ones((), dtype=x.dtype), scale)
    zero = torch.clamp(torch.round(-lowest / scale), 0, 255).to(torch.uint8)
    return saturated(x / scale, zero, torch.uint8), scale, zero


def _by_row(parameter: Tensor, axis: int) -> Tensor:
    """Return a parameter of rows (axis -2) or columns (axis -1) of a matrix so that it broadcasts."""
    if parameter.dim() == 1 and parameter.numel() > 1:
        return parameter.unsqueeze(1 if axis == -2 else 0)
    return parameter.reshape(()) if parameter.numel() == 1 else parameter


@op("QLinearMatMul", since=10)
def matmul_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
) -> Tensor:
    if b.dim() == 2 and a.dim() > 1:
        left, right = Quantized(a, a_scale, a_zero_point), Quantized(b.t(), b_scale, b_zero_point)
        integers = product_of_integers(left, right, Quantized(None, y_scale, y_zero_point), None)
        if integers is not None:
            return integers
    product = torch.matmul(centered(a, a_zero_point, -2), centered(b, b_zero_point, -1))
    scale = _by_row(a_scale, -2).to(torch.float32) * _by_row(b_scale, -1).to(torch.float32)
    scale = scale / _by_row(y_scale, -2).to(torch.float32)
    return saturated(product.to(torch.float32) * scale, _by_row(y_zero_point, -2), y_zero_point.dtype)


@op("QLinearConv", since=10)
def convolution_quantized(
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
    geometry: Geometry,
) -> Tensor:
    if geometry.group == 1 and x.dim() == w.dim() == 4:
        kernel, strides, dilations = geometry.along(x, w)
        y = convolution_of_integers(
            Quantized(x, x_scale, x_zero_point),
            Quantized(w, w_scale, w_zero_point),
            Quantized(None, y_scale, y_zero_point),
            b,
            strides=strides,
            pads=padding_of(geometry.auto_pad, geometry.pads, x.shape[2:], kernel, strides, dilations),
            dilations=dilations,
        )
        if y is not None:
            return y
    total = convolution(
        centered(x, x_zero_point.reshape(()), 0),
        centered(w, along(w_zero_point, 0, w.dim()) if w_zero_point.numel() > 1 else w_zero_point.reshape(()), 0),
        None if b is None else b.to(torch.float64),
        geometry=geometry,
    )
    scale = x_scale.reshape(()) * w_scale.reshape(-1) / y_scale.reshape(())
    scaled = total.to(torch.float32) * along(scale, 1, x.dim())
    return saturated(scaled, y_zero_point.reshape(()), y_zero_point.dtype)
