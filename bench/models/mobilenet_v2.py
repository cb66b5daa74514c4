"""MobileNetV2 (torchvision), random weights."""

from functools import partial

import torch
import torchvision

from bench.models.batch_statistics import settled
from bench.models.half import channels_last


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it, batch 1."""
    image = torch.randn(1, 3, 224, 224)
    return settled(torchvision.models.mobilenet_v2(), image), (image,)


def fp16(batch: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, _ = fp32()
    return channels_last(module, torch.randn(batch, 3, 224, 224))


fp16_batch_4, fp16_batch_16, fp16_batch_64 = (partial(fp16, batch) for batch in (4, 16, 64))
