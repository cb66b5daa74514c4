"""Depthwise convolution as an op of ours: each result reads one channel; bias and activation in the same launch.

Where there are several results for each channel, those of one channel lie side by side, as torch has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from nimblec.kernels.candidates import MULTIPROCESSORS
from nimblec.kernels.launching import geometry
from nimblec.kernels.ops import channels_last, convolution_shape, laid_like, new_images
from nimblec.kernels.reference import Prologue, finish
from nimblec.kernels.shapes import Convolution, ceil_div

_LIBRARY = torch.library.Library("nimblec", "FRAGMENT")
"""The op lives as long as this module."""

_LIBRARY.define(
    "depthwise(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int out_channels, int[] kernel, int[] stride, "
    "int[] padding, int[] dilation, str activation, int[] tiling, str trigger, *, "
    "Tensor? scale=None, Tensor? shift=None, Tensor? gate=None, str before='none') -> Tensor"
)

_VECTOR = 8
"""Channels that a thread loads at once, 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseTiling:
    """A block computes ``block_m`` pixels of ``block_c`` channels."""

    block_m: int
    block_c: int
    num_warps: int = 4

    @property
    def numbers(self) -> list[int]:
        """What the op takes as its ``tiling``."""
        return [self.block_m, self.block_c, self.num_warps]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The inverse of `numbers`."""
        block_m, block_c, num_warps = numbers
        return cls(block_m=block_m, block_c=block_c, num_warps=num_warps)

    def blocks(self, shape: Convolution) -> int:
        """How many blocks are launched."""
        return ceil_div(shape.rows, self.block_m) * ceil_div(shape.out_channels, self.block_c)


def depthwise_candidates(shape: Convolution, *, limit: int = 5) -> list[DepthwiseTiling]:
    """Tilings with about two blocks for each multiprocessor first, and as little work past the edges as can be."""
    found = []
    for block_c in (16, 32, 64, 128):
        for block_m in (4, 8, 16, 32, 64):
            threads = block_m * block_c // _VECTOR
            if 32 <= threads <= 512:
                found.append(DepthwiseTiling(block_m=block_m, block_c=block_c, num_warps=min(threads // 32, 8)))

    def cost(tiling: DepthwiseTiling) -> tuple[float, list[int]]:
        done = tiling.blocks(shape) * tiling.block_m * tiling.block_c / (shape.rows * shape.out_channels)
        load = tiling.blocks(shape) / (2 * MULTIPROCESSORS)
        return done * max(load**0.5, load**-0.5), tiling.numbers

    return sorted(found, key=cost)[:limit]


def pack_depthwise(weight: Tensor, tiling: DepthwiseTiling) -> Tensor:
    """Weights (out channels, 1, height, width) as (tiles of them, taps, block_c), zeros past the edge."""
    channels, taps = weight.shape[0], weight[0].numel()
    tiles = ceil_div(channels, tiling.block_c)
    padded = weight.new_zeros(tiles * tiling.block_c, taps)
    padded[:channels] = weight.reshape(channels, taps)
    return padded.reshape(tiles, tiling.block_c, taps).transpose(1, 2).contiguous()


def launch_depthwise(
    shape: Convolution,
    tiling: DepthwiseTiling,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    prologue: Prologue,
    out: Tensor,
    activation: str,
    trigger: str,
) -> None:
    """Write the convolution of ``x`` to ``out`` (rows, channels as they lie in memory)."""
    from nimblec.kernels.depthwise_template import depthwise as template

    constants = depthwise_settings(shape, tiling, before=prologue.activation, activation=activation, trigger=trigger)
    template[tiling.blocks(shape),](x, weight, bias, residual, *prologue.tensors, out, **constants)


def depthwise_settings(
    shape: Convolution, tiling: DepthwiseTiling, *, activation: str, trigger: str, before: str = "none"
) -> dict[str, Any]:
    """What is compiled into a kernel: the template's constants and Triton's options."""
    return {
        **geometry(shape),
        "OUT_CHANNELS": shape.out_channels,
        "BEFORE": before,
        "ACTIVATION": activation,
        "BLOCK_M": tiling.block_m,
        "BLOCK_C": tiling.block_c,
        "TRIGGER": trigger,
        "num_warps": tiling.num_warps,
        "launch_pdl": trigger != "none",
    }


def _depthwise_fake(
    x: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_how: object,
    **_prologue: object,
) -> Tensor:
    return new_images(x, convolution_shape(x, out_channels, kernel, stride, padding, dilation))


def _depthwise_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    tiling: Sequence[int],
    trigger: str,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    before: str = "none",
) -> Tensor:
    x = channels_last(x)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    out = new_images(x, shape)
    launch_depthwise(
        shape,
        DepthwiseTiling.of(tiling),
        x=x,
        weight=weight,
        bias=bias,
        residual=laid_like(residual, out),
        prologue=Prologue(scale=scale, shift=shift, gate=gate, activation=before),
        out=out,
        activation=activation,
        trigger=trigger,
    )
    return out


def _depthwise_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    activation: str,
    tiling: Sequence[int],  # noqa: ARG001
    trigger: str,  # noqa: ARG001
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    before: str = "none",
) -> Tensor:
    x, channels = channels_last(x), x.shape[1]
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    filters = weight.transpose(1, 2).flatten(0, 1)[:out_channels].reshape(out_channels, 1, *shape.kernel).float()
    vector = None if bias is None else bias.float()
    read = Prologue(scale=scale, shift=shift, gate=gate, activation=before)(x.float())
    total = functional.conv2d(read, filters, vector, shape.stride, shape.padding, shape.dilation, channels)
    return new_images(x, shape).copy_(finish(total, residual, activation))


torch.library.register_fake("nimblec::depthwise", _depthwise_fake, lib=_LIBRARY)
_LIBRARY.impl("depthwise", _depthwise_cuda, "CUDA")
_LIBRARY.impl("depthwise", _depthwise_cpu, "CPU")

depthwise: OpOverload = torch.ops.nimblec.depthwise.default
