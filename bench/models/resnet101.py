"""ResNet-101 (torchvision), random weights, batch 1."""

import torch
import torchvision

from bench.models.batch_statistics import settled
from bench.models.half import channels_last


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    image = torch.randn(1, 3, 224, 224)
    return settled(torchvision.models.resnet101(), image), (image,)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, (image,) = fp32()
    return channels_last(module, image)
