"""The launches of convolutions of trained weights, and of the gradients of their images."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from nimblec.kernels.images import pixel_stride
from nimblec.kernels.launch import Launch
from nimblec.kernels.products.depthwise_tilings import DepthwiseTiling
from nimblec.kernels.products.gemm_tilings import Tiling
from nimblec.kernels.products.packing import CUT_OFF
from nimblec.kernels.products.trained_tilings import image_product
from nimblec.kernels.shapes import Convolution

TEMPLATES = "nimblec.kernels.products.trained_template"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """How a product is divided into blocks, computed and started; ``counters`` are of tiles whose sum is split."""

    tiling: Tiling
    counters: Tensor | None
    trigger: str
    arithmetic: str

    def pointers(self, tiles: int, device: torch.device) -> dict[str, Tensor | None]:
        """Return the memory in which blocks that share a tile leave their sums, and its counters."""
        split, size = self.tiling.split_k, self.tiling.block_m * self.tiling.block_n
        return shared_sums(split, tiles, size, self.counters, device)

    def settings(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the template's constants, for factors of ``dtype``."""
        return {
            "SCALE": scale(dtype, self.arithmetic),
            "BLOCK_M": self.tiling.block_m,
            "BLOCK_N": self.tiling.block_n,
            "BLOCK_K": self.tiling.block_k,
            "SPLIT_K": self.tiling.split_k,
            "PRECISION": self.arithmetic,
            "num_warps": self.tiling.num_warps,
            "num_stages": self.tiling.num_stages,
        }


def scale(dtype: torch.dtype, arithmetic: str) -> float:
    """Return the factor that compensates for the bits of both factors that tensor cores cut off."""
    return (1 - CUT_OFF) ** -2 if dtype is torch.float32 and arithmetic == "tf32" else 1.0


def shared_sums(
    split: int, tiles: int, size: int, counters: Tensor | None, device: torch.device
) -> dict[str, Tensor | None]:
    """Allocate the sums of ``split`` blocks per tile, ``size`` numbers each; none where ``split`` is 1."""
    if split == 1:
        return {"partials_ptr": None, "counters_ptr": None}
    partials = torch.empty((tiles * split, size), dtype=torch.float32, device=device)
    return {"partials_ptr": partials, "counters_ptr": counters}


def images_launch(
    shape: Convolution,
    cut: Cut,
    *,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    is_gradient: bool,
) -> Launch:
    """Return the launch that writes the convolution of ``source``, or the images' gradient from it, to ``out``."""
    product = image_product(shape) if is_gradient else shape
    tiles = prod(cut.tiling.tiles(product))
    of_channel, of_result = 1, shape.depth
    if is_gradient:
        of_channel, of_result = of_result, of_channel
    return Launch(
        template=f"{TEMPLATES}:images",
        blocks=tiles * cut.tiling.split_k,
        pointers={
            "source_ptr": source,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "out_ptr": out,
            **cut.pointers(tiles, out.device),
        },
        settings={
            **_images_settings(shape, source, out, is_gradient=is_gradient),
            "OUT_CHANNELS": product.out_channels,
            "TAP_STRIDE": shape.channels,
            "CHANNEL_STRIDE": of_channel,
            "COLUMN_STRIDE": of_result,
            **cut.settings(source.dtype),
        },
        trigger=cut.trigger,
    )


def depthwise_images_launch(
    shape: Convolution,
    tiling: DepthwiseTiling,
    *,
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    trigger: str,
    is_gradient: bool,
) -> Launch:
    """Return a launch as `images_launch` does, for depthwise weights (channels, 1, height, width)."""
    return Launch(
        template=f"{TEMPLATES}:depthwise_images",
        blocks=tiling.blocks(image_product(shape) if is_gradient else shape),
        pointers={"source_ptr": source, "weight_ptr": weight, "bias_ptr": bias, "out_ptr": out},
        settings={
            **_images_settings(shape, source, out, is_gradient=is_gradient),
            "BLOCK_M": tiling.block_m,
            "BLOCK_C": tiling.block_c,
            "num_warps": tiling.num_warps,
        },
        trigger=trigger,
    )


def _images_settings(shape: Convolution, source: Tensor, out: Tensor, *, is_gradient: bool) -> dict[str, Any]:
    """Return the constants of a template that makes images ``out`` of ``source``."""
    return {
        **shape.window_settings,
        "ROWS": out.shape[0] * out.shape[2] * out.shape[3],
        "HEIGHT": out.shape[2],
        "WIDTH": out.shape[3],
        "SOURCE_HEIGHT": source.shape[2],
        "SOURCE_WIDTH": source.shape[3],
        "CHANNELS": source.shape[1],
        "PIXEL_STRIDE": pixel_stride(source),
        "IS_GRADIENT": is_gradient,
    }
