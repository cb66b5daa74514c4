"""Networks in half precision, channels last, as tensor cores need for convolutions."""

from typing import Any

import torch
from torch import nn


def channels_last(module: nn.Module, image: torch.Tensor) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """``module`` and ``image`` (batch, channels, height, width) as float16, channels last in memory."""
    half: Any = module.half()  # torch's annotations lack Module.to(memory_format)
    return half.to(memory_format=torch.channels_last), (image.half().to(memory_format=torch.channels_last),)
