"""Depthwise convolution as a torch op: `nimblec.kernels.launch` says what an op is.

Each result reads one channel; bias and activation are in the same launch. With several results for each
channel, those of one channel are adjacent, as in torch. `depthwise_into` writes to ``out``, part of the channels of
larger images.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from nimblec.kernels.images import channels_last, convolution_shape, new_images, pixel_stride
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.reference import Prologue, finish
from nimblec.kernels.shapes import ceil_div


def pack_depthwise(weight: Tensor, tiling: DepthwiseTiling) -> Tensor:
    """Pack weights (out channels, 1, height, width) as (tiles of them, taps, block_c), zeros past the edge."""
    channels, taps = weight.shape[0], weight[0].numel()
    tiles = ceil_div(channels, tiling.block_c)
    padded = functional.pad(weight.reshape(channels, taps), (0, 0, 0, tiles * tiling.block_c - channels))
    return padded.reshape(tiles, tiling.block_c, taps).transpose(1, 2).contiguous()


def _depthwise(
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
    out: Tensor | None = None,
    before: str = "none",
    **factors: Tensor | None,
) -> Prepared[Tensor]:
    x, residual = channels_last(x), None if residual is None else channels_last(residual)
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    out = new_images(x, shape) if out is None else out
    prologue, tile = Prologue(activation=before, **factors), DepthwiseTiling.of(tiling)
    launch = Launch(
        template="nimblec.kernels.products.depthwise_template:depthwise",
        blocks=tile.blocks(shape),
        pointers={
            "x_ptr": x,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "residual_ptr": residual,
            **prologue.pointers,
            "out_ptr": out,
        },
        settings={
            **shape.settings,
            "RESIDUAL_STRIDE": out_channels if residual is None else pixel_stride(residual),
            "OUT_STRIDE": pixel_stride(out),
            "BEFORE": prologue.activation,
            "ACTIVATION": activation,
            "BLOCK_M": tile.block_m,
            "BLOCK_C": tile.block_c,
            "num_warps": tile.num_warps,
        },
        trigger=trigger,
    )
    return Prepared(out, launch)


def _depthwise_on_cpu(
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
    *_how: object,
    out: Tensor | None = None,
    before: str = "none",
    **factors: Tensor | None,
) -> Tensor:
    x, channels = channels_last(x), x.shape[1]
    shape = convolution_shape(x, out_channels, kernel, stride, padding, dilation)
    filters = weight.transpose(1, 2).flatten(0, 1)[:out_channels].reshape(out_channels, 1, *shape.kernel).float()
    vector = None if bias is None else bias.float()
    read = Prologue(activation=before, **factors)(x.float())
    total = functional.conv2d(read, filters, vector, shape.stride, shape.padding, shape.dilation, channels)
    return (new_images(x, shape) if out is None else out).copy_(finish(total, residual, activation))


_DEPTHWISE = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int out_channels, int[] kernel, int[] stride, "
    "int[] padding, int[] dilation, str activation, int[] tiling, str trigger, *, "
    "Tensor? scale=None, Tensor? shift=None, Tensor? gate=None, str before='none'"
)
depthwise = define_op(f"depthwise({_DEPTHWISE}) -> Tensor", prepare=_depthwise, reference=_depthwise_on_cpu)
depthwise_into = define_op(
    f"depthwise_into({_DEPTHWISE}, Tensor(a!) out) -> Tensor(a!)", prepare=_depthwise, reference=_depthwise_on_cpu
)
