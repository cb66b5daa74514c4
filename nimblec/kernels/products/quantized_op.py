"""Convolutions of 8 bit integers by tensor cores as a torch op: `nimblec.kernels.launch` says what an op is.

Results equal those of `nimblec.graph.quantized.quantized_convolution` bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nimblec.graph.quantized import quantized_convolution
from nimblec.kernels.images import channels_last, convolution_shape
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import unpack_rows


def _convolution(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    bias: Tensor,
    levels: Tensor,
    counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    has_zero: bool,
    dtype: torch.dtype,
    tiling: Sequence[int],
    trigger: str,
) -> Prepared[Tensor]:
    x, tiles = channels_last(x), Tiling.of(tiling)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    size = (shape.batch, out_channels, shape.out_height, shape.out_width)
    out = torch.empty(size, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    partials = None
    if tiles.split_k > 1:
        sums = tiles.blocks(shape), tiles.block_m * tiles.block_n
        partials = torch.empty(sums, dtype=torch.int32, device=x.device)
    launch = Launch(
        template="nimblec.kernels.products.quantized_template:quantized_convolution",
        blocks=tiles.blocks(shape),
        pointers={
            "x_ptr": x,
            "weight_ptr": weight,
            "factors_ptr": factors,
            "bias_ptr": bias,
            "levels_ptr": levels,
            "out_ptr": out,
            "partials_ptr": partials,
            "counters_ptr": counters if tiles.split_k > 1 else None,
        },
        settings={
            **shape.settings,
            "HAS_ZERO": has_zero,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "SPLIT_K": tiles.split_k,
            "STAGES": tiles.num_stages,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def zero_sums(weight: Tensor, zero: int, dtype: torch.dtype) -> Tensor:
    """Return what the zero point of pixels of ``dtype`` adds to the kernel's sum of each channel."""
    return (zero - 128 if dtype is torch.uint8 else zero) * weight.flatten(1).sum(1, dtype=torch.int32)


def _convolution_on_cpu(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    bias: Tensor,
    levels: Tensor,
    _counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _has_zero: bool,
    dtype: torch.dtype,
    *_how: object,
) -> Tensor:
    zero, out_zero, *_ = levels.tolist()
    rows = unpack_rows(weight, out_channels, kernel[0] * kernel[1] * x.shape[1])
    filters = rows.reshape(out_channels, *kernel, x.shape[1]).permute(0, 3, 1, 2)
    bias = bias + zero_sums(filters, zero, x.dtype)
    total: Tensor = quantized_convolution(x, filters, factors, bias, zero, out_zero, dtype, stride, padding, dilation)
    return total


convolution_of_integers = define_op(
    "convolution_of_integers(Tensor x, Tensor weight, Tensor factors, Tensor bias, Tensor levels, "
    "Tensor(a!)? counters, int out_channels, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool has_zero, ScalarType dtype, int[] tiling, str trigger) -> Tensor",
    prepare=_convolution,
    reference=_convolution_on_cpu,
)
