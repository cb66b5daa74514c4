"""Callables for networks of one image, in both precisions, with realistic statistics in their batch norms."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Model: TypeAlias = tuple[nn.Module, tuple[Tensor, ...]]
"""A module and its example inputs."""


def channels_last(module: nn.Module, image: Tensor) -> Model:
    """Return ``module`` and ``image`` (batch, channels, height, width) as float16, channels last in memory.

    Tensor cores need this layout for convolutions.
    """
    half: Any = module.half()  # torch's annotations lack Module.to(memory_format)
    return half.to(memory_format=torch.channels_last), (image.half().to(memory_format=torch.channels_last),)


def settled(module: nn.Module, image: Tensor) -> nn.Module:
    """Return ``module`` for inference, its batch norms with the statistics of their inputs on ``image``.

    Without them the activations of a deep network grow or shrink from layer to layer, up to infinities or down to zeros
    in half precision, and outputs cannot be compared.
    """
    norms = [m for m in module.eval().modules() if isinstance(m, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        # With a momentum of 1 the statistics are those of this batch alone.
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        module(image)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
    return module.eval()


def precisions(
    build: Callable[[], nn.Module], size: int = 224, *, settle: bool = False
) -> tuple[Callable[..., Model], Callable[..., Model]]:
    """Return the callables ``fp32`` (as eager PyTorch runs it) and ``fp16`` (channels last) of a batch of images.

    ``settle``: see `settled`, on the first of the images.
    """

    def fp32(batch: int = 1) -> Model:
        module, image = build().eval(), torch.randn(batch, 3, size, size)
        return settled(module, image[:1]) if settle else module, (image,)

    def fp16(batch: int = 1) -> Model:
        module, (image,) = fp32(batch)
        return channels_last(module, image)

    return fp32, fp16


def batches(of_size: Callable[..., Model]) -> list[Callable[[], Model]]:
    """Return the callables for the batch sizes 4, 16 and 64."""
    return [partial(of_size, batch) for batch in (4, 16, 64)]
