"""ResNet-50 (torchvision), random weights."""

from functools import partial

import torch
import torchvision


def fp32() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """As eager PyTorch runs it, batch 1."""
    return torchvision.models.resnet50().eval(), (torch.randn(1, 3, 224, 224),)


def fp16(batch: int = 1) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision, channels last."""
    module = torchvision.models.resnet50().eval().half().to(memory_format=torch.channels_last)
    return module, (torch.randn(batch, 3, 224, 224).half().to(memory_format=torch.channels_last),)


fp16_batch_4, fp16_batch_16, fp16_batch_64 = (partial(fp16, batch) for batch in (4, 16, 64))


def fp16_compiled() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half precision through torch.compile."""
    module, inputs = fp16()
    return torch.compile(module), inputs
