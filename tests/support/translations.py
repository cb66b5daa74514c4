"""Plans for the CPU target beside the functions that they were made of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import nimblec
import nimblert


def each(functions: Iterable[Callable[..., Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """Several functions of the same inputs as one model, for which one export does."""
    return lambda *inputs: tuple(function(*inputs) for function in functions)


def agree(model: Callable[..., Any], example: tuple[Tensor, ...], *others: tuple[Tensor, ...]) -> None:
    """A plan made for the example gives for it and others what PyTorch gives."""
    with nimblert.load(nimblec.compile(model, example, target="cpu", streams=1)) as exe:
        for inputs in (example, *others):
            found = tree_map(torch.from_numpy, exe(*(tensor.numpy() for tensor in inputs)))
            torch.testing.assert_close(found, model(*inputs), equal_nan=True)
