"""What the kernels compute, in torch: the ops' meaning on the CPU, and what tests compare with."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
}
"""By the names that the ops take."""


def finish(total: Tensor, residual: Tensor | None, activation: str) -> Tensor:
    """Residual and activation in the dtype of ``total``."""
    return ACTIVATIONS[activation](total if residual is None else total + residual.to(total.dtype))
