"""Pooling as torch ops: `nimblec.kernels.launch` says what an op is.

Images (batch, channels, height, width) lie channels last or contiguous, and results in the same layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nimblec.kernels.images import pixel_stride
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.reductions.pool_shapes import KINDS, Pooling, lies_channels_last, means_of
from nimblec.kernels.reductions.pool_tilings import PoolTiling
from nimblec.kernels.reference import activated
from nimblec.kernels.shapes import ceil_div, pair

aten = torch.ops.aten


def pooling_shape(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Pooling:
    """Return the geometry for images that lie channels last or contiguous."""
    batch, channels, height, width = x.shape
    is_last = lies_channels_last(x)
    assert is_last or x.is_contiguous(), f"images of strides {x.stride()} lie neither contiguous nor channels last"
    return Pooling(
        images=batch if is_last else batch * channels,
        height=height,
        width=width,
        channels=channels if is_last else 1,
        kernel=pair(kernel),
        stride=pair(stride),
        padding=pair(padding),
        dilation=pair(dilation),
        ceil_mode=ceil_mode,
        pixel_stride=pixel_stride(x) if is_last else 1,
    )


def _pool2d(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    divisor: int | None,
    activation: str,
    tiling: Sequence[int],
    trigger: str,
) -> Prepared[Tensor]:
    assert kind in KINDS, f"{kind} is none of {KINDS}"
    shape, tile = pooling_shape(x, kernel, stride, padding, dilation, ceil_mode), PoolTiling.of(tiling)
    size = (*x.shape[:2], shape.out_height, shape.out_width)
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_format(lies_channels_last(x)))
    launch = Launch(
        template="nimblec.kernels.reductions.pool_template:pool",
        blocks=tile.blocks_over(shape.rows, shape.channels),
        pointers={"x_ptr": x, "out_ptr": out},
        settings={
            **shape.settings,
            "KIND": kind,
            "DIVISOR": divisor or 0,
            "ACTIVATION": activation,
            "BLOCK_M": tile.block_m,
            "BLOCK_C": tile.block_c,
            "num_warps": tile.num_warps,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _pool2d_on_cpu(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    divisor: int | None,
    activation: str,
    *_how: object,
) -> Tensor:
    if kind == "max":
        geometry = (list(kernel), list(stride), list(padding), list(dilation))
        pooled = functional.max_pool2d(x.float(), *geometry, ceil_mode)
    else:
        counts_padding = kind == "padded average"
        pooled = aten.avg_pool2d.default(x.float(), kernel, stride, padding, ceil_mode, counts_padding, divisor)
    return _laid(activated(pooled, activation), x.dtype, lies_channels_last(x))


def _mean2d(x: Tensor, channels_last: bool, activation: str, tiling: Sequence[int], trigger: str) -> Prepared[Tensor]:
    shape, tile = means_of(x), PoolTiling.of(tiling)
    size = (*x.shape[:2], 1, 1)
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_format(channels_last))
    launch = Launch(
        template="nimblec.kernels.reductions.pool_template:mean",
        blocks=shape.images * ceil_div(shape.channels, tile.block_c),
        pointers={"x_ptr": x, "out_ptr": out},
        settings={
            "PIXELS": shape.pixels,
            "CHANNELS": shape.channels,
            "IMAGE_STRIDE": shape.image_stride,
            "PIXEL_STRIDE": shape.pixel_stride,
            "CHANNEL_STRIDE": shape.channel_stride,
            "ACTIVATION": activation,
            "BLOCK_P": tile.block_m,
            "BLOCK_C": tile.block_c,
            "num_warps": tile.num_warps,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _mean2d_on_cpu(x: Tensor, channels_last: bool, activation: str, *_how: object) -> Tensor:
    return _laid(activated(x.float().mean((2, 3), keepdim=True), activation), x.dtype, channels_last)


def _laid(images: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    return torch.empty(images.shape, dtype=dtype, memory_format=_format(channels_last)).copy_(images)


def _format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


pool2d = define_op(
    "pool2d(Tensor x, str kind, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode, "
    "int? divisor, str activation, int[] tiling, str trigger) -> Tensor",
    prepare=_pool2d,
    reference=_pool2d_on_cpu,
)
mean2d = define_op(
    "mean2d(Tensor x, bool channels_last, str activation, int[] tiling, str trigger) -> Tensor",
    prepare=_mean2d,
    reference=_mean2d_on_cpu,
)
