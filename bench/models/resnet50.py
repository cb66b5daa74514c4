"""ResNet-50 (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return torchvision.models.resnet50().eval(), (torch.randn(1, 3, 224, 224),)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module = torchvision.models.resnet50().eval().half().to(memory_format=torch.channels_last)
    return module, (torch.randn(1, 3, 224, 224).half().to(memory_format=torch.channels_last),)


def fp16_compiled() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision through torch.compile."""
    module, inputs = fp16()
    return torch.compile(module), inputs
