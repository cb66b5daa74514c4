"""Plans for the CPU target beside the functions that they were made of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import nimblec
import nimblert


def each(functions: Iterable[Callable[..., Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """Join several functions of the same inputs to one model, so that one export does for all."""
    return lambda *inputs: tuple(function(*inputs) for function in functions)


def agree(model: Callable[..., Any], example: tuple[Tensor, ...], *others: tuple[Tensor, ...]) -> None:
    """Check that a plan made for the example gives PyTorch's results for it and for others."""
    with nimblert.load(nimblec.compile(model, example, target="cpu", streams=1)) as exe:
        for inputs in (example, *others):
            found = tree_map(torch.from_numpy, exe(*(tensor.numpy() for tensor in inputs)))
            torch.testing.assert_close(found, model(*inputs), equal_nan=True)
