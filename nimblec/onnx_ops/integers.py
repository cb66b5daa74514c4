"""Convolutions and products of quantised tensors as calls on integers."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from nimblec.graph.quantized import EIGHT_BITS, quantized_convolution
from nimblec.onnx_ops.convolution import pad_spatial
from nimblec.onnx_ops.table import Ints


class Quantized(NamedTuple):
    """Integers that stand for ``(values - zero) * scale``; those of a result are None while it is computed."""

    values: Tensor | None
    scale: Tensor
    zero: Tensor


def convolution_of_integers(
    x: Quantized,
    w: Quantized,
    y: Quantized,
    bias: Tensor | None,
    *,
    strides: Ints = (1, 1),
    pads: tuple[Ints, Ints] = ((0, 0), (0, 0)),
    dilations: Ints = (1, 1),
) -> Tensor | None:
    """Convolve images, with ``pads`` before and after each axis.

    None where the integers are not of 8 bits, weights, scales or zero points are not known, or weights have a zero
    point.
    """
    known = (w.values, w.zero, w.scale, x.scale, x.zero, y.scale, y.zero, bias)
    assert x.values is not None
    assert w.values is not None
    if any(isinstance(tensor, FakeTensor) for tensor in known) or w.values.dtype != torch.int8 or w.zero.any():
        return None
    if max(each.numel() for each in (x.scale, x.zero, y.scale, y.zero)) > 1 or x.scale.dtype != torch.float32:
        return None
    if x.values.dtype not in EIGHT_BITS or y.zero.dtype not in EIGHT_BITS:
        return None
    channels, images, filters, (before, after) = w.values.shape[0], x.values, w.values, pads
    if before != after or min(before) < 0:
        images, before = pad_spatial(images, before, after, value=int(x.zero)), (0, 0)
    if (missing := 4 - images.shape[1]) > 0:
        # Kernels read four channels at once. The weights of an added channel are 0.
        images, filters = (functional.pad(each, (0, 0, 0, 0, 0, missing)) for each in (images, filters))
    factors = x.scale.reshape(()) * w.scale.reshape(-1) / y.scale.reshape(())
    return quantized_convolution(
        images.contiguous(memory_format=torch.channels_last),
        filters,
        factors.expand(channels).contiguous(),
        torch.zeros(channels, dtype=torch.int32) if bias is None else bias,
        int(x.zero),
        int(y.zero),
        y.zero.dtype,
        strides,
        before,
        dilations,
    )


def product_of_integers(a: Quantized, w: Quantized, y: Quantized, bias: Tensor | None) -> Tensor | None:
    """Multiply the rows of ``a`` by those of ``w``, (columns, depth); None where `convolution_of_integers` is."""
    assert a.values is not None
    assert w.values is not None
    rows = a._replace(values=a.values.reshape(-1, a.values.shape[-1], 1, 1))
    filters = w._replace(values=w.values.reshape(*w.values.shape, 1, 1))
    product = convolution_of_integers(rows, filters, y, bias)
    return None if product is None else product.reshape(*a.values.shape[:-1], w.values.shape[0])
