"""MobileNetV2 (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module = torchvision.models.mobilenet_v2().eval().half().to(memory_format=torch.channels_last)
    return module, (torch.randn(1, 3, 224, 224).half().to(memory_format=torch.channels_last),)
