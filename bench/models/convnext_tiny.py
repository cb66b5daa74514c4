"""ConvNeXt-tiny (torchvision), random weights, batch 1; layer scales as after training instead of 1e-6."""

import torch
import torchvision

from bench.models.half import channels_last


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return torchvision.models.convnext_tiny(layer_scale=0.1).eval(), (torch.randn(1, 3, 224, 224),)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, (image,) = fp32()
    return channels_last(module, image)
