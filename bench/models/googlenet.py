"""GoogLeNet (torchvision), random weights, batch 1."""

import torch
import torchvision

from bench.models.half import channels_last


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module = torchvision.models.googlenet(init_weights=False, transform_input=False)
    return channels_last(module.eval(), torch.randn(1, 3, 224, 224))
