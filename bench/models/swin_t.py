"""Swin-T (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return torchvision.models.swin_t().eval(), (torch.randn(1, 3, 224, 224),)
