"""ViT-B/16 (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build the model with attention as eager PyTorch runs it."""
    module = torchvision.models.vit_b_16()
    # The head's weights are zeros before training.
    torch.nn.init.normal_(module.heads.head.weight, std=0.02)
    return module.eval(), (torch.randn(1, 3, 224, 224),)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Build the model in half precision."""
    module, (image,) = fp32()
    return module.half(), (image.half(),)
