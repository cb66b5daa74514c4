"""The moments of groups of channels as a torch op: `nimblec.kernels.launch` says what an op is.

The kernel leaves ``counters``, one for each group of each image, zero; concurrent calls need counters of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nimblec.kernels.gpu import GPU
from nimblec.kernels.images import pixel_stride
from nimblec.kernels.launch import Launch, Prepared, define_op
from nimblec.kernels.shapes import ceil_div, next_power_of_2
from nimblec.kernels.tilings import NumberedTiling

_WIDEST = 128
"""Channels that a block reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """``groups`` groups of ``channels`` channels in each of some images of ``pixels`` pixels."""

    images: int
    pixels: int
    groups: int
    channels: int
    pixel_stride: int

    @property
    def rows(self) -> int:
        """The number of means."""
        return self.images * self.groups

    @property
    def width(self) -> int:
        """The channels of a block: a power of two."""
        return min(_WIDEST, next_power_of_2(self.channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiling(NumberedTiling):
    """Each of ``parts`` blocks reads some of the pixels of a group, ``block_p`` at once."""

    parts: int
    block_p: int


def groups_of(x: Tensor, groups: int) -> Groups:
    """Return the geometry of images that lie channels last, or are a slice of the channels of such."""
    images, channels, height, width = x.shape
    return Groups(
        images=images,
        pixels=height * width,
        groups=groups,
        channels=channels // groups,
        pixel_stride=pixel_stride(x),
    )


def group_candidates(shape: Groups, gpu: GPU) -> list[GroupTiling]:
    """Return tilings with one or two blocks per multiprocessor, as far as the groups have pixels for them."""
    found: dict[GroupTiling, None] = {}
    for blocks in (2 * gpu.multiprocessors, gpu.multiprocessors):
        for numbers in (4096, 2048):
            block_p = min(numbers // shape.width, next_power_of_2(shape.pixels))
            parts = max(1, min(ceil_div(blocks, shape.rows), ceil_div(shape.pixels, block_p)))
            found[GroupTiling(parts=parts, block_p=block_p)] = None
    return list(found)


def _group_moments(
    x: Tensor, counters: Tensor, groups: int, eps: float, tiling: Sequence[int], trigger: str
) -> Prepared[tuple[Tensor, Tensor]]:
    shape, tile = groups_of(x, groups), GroupTiling.of(tiling)
    mean, scale = (x.new_empty((shape.images, groups), dtype=torch.float32) for _ in range(2))
    partials = x.new_empty((shape.rows, tile.parts, 2), dtype=torch.float32) if tile.parts > 1 else None
    launch = Launch(
        template="nimblec.kernels.reductions.group_norm_template:group_moments",
        blocks=shape.rows * tile.parts,
        pointers={
            "x_ptr": x,
            "mean_ptr": mean,
            "scale_ptr": scale,
            "partials_ptr": partials,
            "counters_ptr": None if partials is None else counters,
        },
        settings={
            "PIXELS": shape.pixels,
            "CHANNELS": shape.channels,
            "GROUPS": groups,
            "PIXEL_STRIDE": shape.pixel_stride,
            "EPS": eps,
            "PARTS": tile.parts,
            "PADDED": next_power_of_2(tile.parts),
            "BLOCK_P": tile.block_p,
            "BLOCK_C": shape.width,
        },
        trigger=trigger,
    )
    return Prepared((mean, scale), launch)


def _group_moments_on_cpu(
    x: Tensor, _counters: Tensor, groups: int, eps: float, *_how: object
) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float().reshape(x.shape[0], groups, -1), 2, correction=0)
    return mean, torch.rsqrt(variance + eps)


group_moments = define_op(
    "group_moments(Tensor x, Tensor(a!) counters, int groups, float eps, int[] tiling, str trigger) "
    "-> (Tensor, Tensor)",
    prepare=_group_moments,
    reference=_group_moments_on_cpu,
)
"""The mean, and 1 / sqrt(variance + eps), both (images, groups) in float32."""
