"""ConvNeXt-tiny (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return torchvision.models.convnext_tiny().eval(), (torch.randn(1, 3, 224, 224),)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, (image,) = fp32()
    return (
        module.half().to(memory_format=torch.channels_last),
        (image.half().to(memory_format=torch.channels_last),),
    )
