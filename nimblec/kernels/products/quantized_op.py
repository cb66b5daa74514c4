"""Convolutions of 8 bit integers by tensor cores as a torch op: `nimblec.kernels.launch` says what an op is.

Results equal those of `nimblec.graph.quantized.quantized_convolution`, and of the calls after it, bit for bit: no sum
of floats is fused with a product.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from nimblec.graph.quantized import quantized_convolution
from nimblec.kernels.images import channels_last, convolution_shape, laid_like
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import unpack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Numbers that a launch reads, in this order, so that calls of one shape share a kernel.

    The result of the convolution has the zero point ``own_zero`` and the limits ``own_low`` and ``own_high``. Where it
    is quantised again, it stands for multiples of ``own_scale``, to which those of a residual are added; the sum is
    divided by ``scale`` and rounded like the result.
    """

    x_zero: float
    own_zero: float
    own_low: float
    own_high: float
    own_scale: float = 1.0
    residual_zero: float = 0.0
    residual_scale: float = 1.0
    scale: float = 1.0
    zero: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def tensor(self, device: torch.device) -> Tensor:
        """Return the numbers as a kernel reads them."""
        return torch.tensor(astuple(self), dtype=torch.float32, device=device)

    @classmethod
    def of(cls, numbers: Tensor) -> "Levels":
        """Return the inverse of `tensor`."""
        return cls(**dict(zip((field.name for field in fields(cls)), numbers.tolist(), strict=True)))


def _convolution(
    x: Tensor,
    weight: Tensor,
    factors: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    levels: Tensor,
    counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    has_zero: bool,
    is_requantized: bool,
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
            "residual_ptr": laid_like(residual, out),
            "levels_ptr": levels,
            "out_ptr": out,
            "partials_ptr": partials,
            "counters_ptr": counters if tiles.split_k > 1 else None,
        },
        settings={
            **shape.settings,
            "HAS_ZERO": has_zero,
            "IS_REQUANTIZED": is_requantized,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "SPLIT_K": tiles.split_k,
            "STAGES": tiles.num_stages,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "enable_fp_fusion": False,
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
    residual: Tensor | None,
    levels: Tensor,
    _counters: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _has_zero: bool,
    is_requantized: bool,
    dtype: torch.dtype,
    *_how: object,
) -> Tensor:
    known = Levels.of(levels)
    rows = unpack_rows(weight, out_channels, kernel[0] * kernel[1] * x.shape[1])
    filters = rows.reshape(out_channels, *kernel, x.shape[1]).permute(0, 3, 1, 2)
    zero, own_zero = int(known.x_zero), int(known.own_zero)
    bias = bias + zero_sums(filters, zero, x.dtype)
    own_dtype = torch.uint8 if known.own_high == torch.iinfo(torch.uint8).max else torch.int8
    own = quantized_convolution(x, filters, factors, bias, zero, own_zero, own_dtype, stride, padding, dilation)
    return requantized(own, residual, known, dtype) if is_requantized else own


def requantized(own: Tensor, residual: Tensor | None, levels: Levels, dtype: torch.dtype) -> Tensor:
    """Return the multiples that a result stands for, and those of a residual, as integers of another scale."""
    total = (own.float() - levels.own_zero) * levels.own_scale
    if residual is not None:
        total = total + (residual.float() - levels.residual_zero) * levels.residual_scale
    return (torch.round(total / levels.scale) + levels.zero).clamp(levels.low, levels.high).to(dtype)


convolution_of_integers = define_op(
    "convolution_of_integers(Tensor x, Tensor weight, Tensor factors, Tensor bias, Tensor? residual, "
    "Tensor levels, Tensor(a!)? counters, int out_channels, int[] kernel, int[] stride, int[] padding, "
    "int[] dilation, bool has_zero, bool is_requantized, ScalarType dtype, int[] tiling, str trigger) -> Tensor",
    prepare=_convolution,
    reference=_convolution_on_cpu,
)
