"""Borrow a user's module and restore it afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.nn.modules import transformer

Originals: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a module, each with its values before it was borrowed."""


@contextmanager
def borrowed(model: Any) -> Iterator[Originals]:
    """Replace the parameters and buffers of a module by copies on the CPU inside the block, which gets the originals.

    Afterwards every attribute of every submodule is restored; a plain function is left alone. torch's fused encoder
    layers stay off meanwhile: for a padding mask they take nested tensors, which no exporter does, and give zeros where
    the layers themselves compute something.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _restored(model) as originals, masks_as_given():
            yield originals
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Keep torch's encoder and decoder layers from reading a mask to see whether it is the causal one.

    They would give attention that hint, and a plan cannot read values.
    """
    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = _as_told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


def _as_told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    del mask, size
    return is_causal is True


@contextmanager
def _restored(model: Any) -> Iterator[Originals]:
    if not isinstance(model, torch.nn.Module):
        yield ()
        return
    data = {id(tensor): (tensor, tensor.data) for tensor in chain(model.parameters(), model.buffers())}
    originals = tuple(data.values())
    with attributes_kept(model):
        try:
            for tensor, its_data in originals:
                tensor.data = its_data.to("cpu", copy=True)
            yield originals
        finally:
            for tensor, its_data in originals:
                tensor.data = its_data


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore every attribute of every submodule after the block, which may run the model on fake tensors."""
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    contents = [(kept, dict(kept)) for _, found in attributes for kept in found.values() if isinstance(kept, dict)]
    try:
        yield
    finally:
        for module, found in attributes:
            module.__dict__.clear()
            module.__dict__.update(found)
        for kept, items in contents:
            kept.clear()
            kept.update(items)
