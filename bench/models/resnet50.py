"""ResNet-50 (torchvision), random weights."""

from functools import partial
from typing import Any

import torch
import torchvision

from bench.models.half import channels_last


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it, batch 1."""
    return torchvision.models.resnet50().eval(), (torch.randn(1, 3, 224, 224),)


def fp16(batch: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    return channels_last(torchvision.models.resnet50().eval(), torch.randn(batch, 3, 224, 224))


fp16_batch_4, fp16_batch_16, fp16_batch_64 = (partial(fp16, batch) for batch in (4, 16, 64))


def fp16_compiled() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision through torch.compile."""
    module, inputs = fp16()
    compiled: Any = torch.compile(module)
    return compiled, inputs
