"""PNASNet-5 large (timm), random weights, batch 1."""

import timm
import torch


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    return timm.create_model("pnasnet5large").eval(), (torch.randn(1, 3, 331, 331),)
