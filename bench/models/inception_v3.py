"""Inception-v3 (torchvision), random weights, batch 1."""

import torch
import torchvision


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module = torchvision.models.inception_v3(init_weights=False, transform_input=False)
    module = module.eval().half().to(memory_format=torch.channels_last)
    return module, (torch.randn(1, 3, 299, 299).half().to(memory_format=torch.channels_last),)
