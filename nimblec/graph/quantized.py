"""Convolutions of 8 bit integers as one call, which a graph holds until a kernel of integers takes its place."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The op lives as long as this module."""

EIGHT_BITS = (torch.uint8, torch.int8)

MOST_PRODUCTS = 1 << 16
"""Sums of this many products of 8 bit integers fit into 32 bits."""


def _quantized_convolution(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    bias: Tensor,
    zero: int,
    out_zero: int,
    dtype: torch.dtype,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolve ``x - zero`` with ``weight``; return the sums times ``factors``, rounded to ``dtype``.

    ``x`` is uint8 or int8, ``weight`` int8. The bias, int32 and one for each channel as the factors, is added to the
    sums, which are exact: float64 holds them. Rounding is to even; then ``out_zero`` is added.
    """
    total = functional.conv2d(x.double() - zero, weight.double(), bias.double(), stride, padding, dilation)
    limits = torch.iinfo(dtype)
    rounded = torch.round(total.float() * factors[:, None, None]) + out_zero
    return rounded.clamp(limits.min, limits.max).to(dtype, memory_format=torch.channels_last)


_SCHEMA = (
    "quantized_convolution(Tensor x, Tensor weight, Tensor factors, Tensor bias, int zero, int out_zero, "
    "ScalarType dtype, int[] stride, int[] padding, int[] dilation) -> Tensor"
)
_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("quantized_convolution", _quantized_convolution, "CompositeExplicitAutograd")
torch.library.register_fake("nimblec::quantized_convolution", _quantized_convolution, lib=_LIBRARY)
quantized_convolution = torch.ops.nimblec.quantized_convolution.default
