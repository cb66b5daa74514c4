"""MobileViT-S (timm), random weights, batch 1."""

import timm
import torch


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return timm.create_model("mobilevit_s").eval(), (torch.randn(1, 3, 256, 256),)
