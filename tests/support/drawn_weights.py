"""Small networks with seeded random weights, of a size at which values neither vanish nor overflow."""

import math
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Draw a weight: variances and factors around 1, biases around 0, and matrices that preserve the variance."""
    if name.endswith("running_var"):
        return 0.5 + torch.rand(shape, generator=generator)
    numbers = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return numbers / math.sqrt(math.prod(shape[1:]))
    return numbers / 10 + name.endswith("weight")


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Give the module random parameters and statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(drawn(name, tensor.shape, generator))
    return module.eval()


def family(name: str, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Build a network of `families` with weights of this seed, and its inputs."""
    module, args = import_module(f"families.{name}").small()
    return randomised(module, seed), args


resnet_0, resnet_1, bert_0, bert_1 = (partial(family, name, seed) for name in ("resnet", "bert") for seed in (0, 1))
"""Under the names for compilations."""
