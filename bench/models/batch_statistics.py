"""Realistic statistics for the batch norms of a network with random weights."""

import torch
from torch import nn


def settled(module: nn.Module, image: torch.Tensor) -> nn.Module:
    """``module`` for inference, its batch norms with the statistics of their inputs on ``image``.

    Without them the activations of a deep network grow or shrink from layer to layer, up to infinities or down to zeros
    in half precision, and outputs cannot be compared.
    """
    norms = [m for m in module.eval().modules() if isinstance(m, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # the statistics of this batch alone
        norm.train()
    with torch.no_grad():
        module(image)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
    return module.eval()
