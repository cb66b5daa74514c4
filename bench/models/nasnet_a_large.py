"""NASNet-A large, random weights, batch 1: timm's, if the installed release has it."""

import timm
import torch

from bench.models.batch_statistics import settled
from bench.models.half import channels_last


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it."""
    image = torch.randn(1, 3, 331, 331)
    return settled(timm.create_model("nasnetalarge"), image), (image,)


def fp16() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module, (image,) = fp32()
    return channels_last(module, image)
