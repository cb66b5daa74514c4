"""Storages of tensors without data as buffers of the IR."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.ir import Access, Buffer, BufferKind, TensorView
from nimblec.cuda.capture.capture import pieces
from nimblec.pytorch.tensors import DTYPE_NAMES, range_of

_MOST_PIECES = 64


class BufferTable:
    """Buffers of the IR for the storages of tensors, numbered in order of first use; keeps the storages alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._buffers: list[Buffer] = []

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's buffer: memory of the run unless it was added otherwise."""
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self._add(tensor, Buffer(kind=BufferKind.TEMPORARY, nbytes=tensor.untyped_storage().nbytes()))
        return self._numbers[key]

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the number of a tensor's buffer, and the offset of its first element there."""
        return self.number(tensor), int(tensor.storage_offset()) * tensor.element_size()

    def add_constant(self, tensor: torch.Tensor, value: torch.Tensor, name: str, *, is_state: bool) -> None:
        """Add the buffer of ``tensor``, which begins as the real ``value`` of equal strides."""
        nbytes = tensor.untyped_storage().nbytes()
        filled = torch.zeros(nbytes // value.element_size(), dtype=value.dtype)
        filled.as_strided(value.shape, value.stride()).copy_(value.detach())
        self._add(
            tensor,
            Buffer(
                kind=BufferKind.STATE if is_state else BufferKind.CONSTANT,
                nbytes=nbytes,
                name=name,
                dtype=DTYPE_NAMES[value.dtype] if value.is_contiguous() else "uint8",
                shape=tuple(value.shape) if value.is_contiguous() else (nbytes,),
                data=memoryview(filled.view(torch.uint8).numpy().data),
                storage=value.untyped_storage()._cdata,
            ),
        )

    def add_input(self, name: str, tensor: torch.Tensor, example: torch.Tensor) -> TensorView:
        """Add the buffer of an input."""
        self._add(tensor, Buffer(kind=BufferKind.INPUT, nbytes=tensor.untyped_storage().nbytes(), name=name))
        return replace(self._view(name, tensor), sample_range=range_of(name, example))

    def add_output(self, name: str, tensor: torch.Tensor) -> TensorView:
        """Mark the memory of a result as an output."""
        if not tensor.numel():
            raise UnsupportedModelError(f"{name!r} is empty: a CUDA plan holds tensors of its device")
        index = self.number(tensor)
        if self._buffers[index].kind is BufferKind.TEMPORARY:
            self._buffers[index] = replace(self._buffers[index], kind=BufferKind.OUTPUT)
        return self._view(name, tensor)

    def accesses(self, value: Any) -> Iterator[Access]:
        """Yield the memory of all tensors in ``value``: the pieces between gaps, or one range if these are many."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                buffer, begin = self.place(leaf)
                size = leaf.element_size()
                for first, end in pieces(leaf.shape, leaf.stride(), most=_MOST_PIECES):
                    yield Access(buffer=buffer, offset=begin + first * size, nbytes=(end - first) * size)

    def buffers(self, written: Iterable[int]) -> tuple[Buffer, ...]:
        """Return all buffers, by number; a weight among the ``written`` ones is state."""
        found = list(self._buffers)
        for index in {*written}:
            if found[index].kind is BufferKind.CONSTANT:
                found[index] = replace(found[index], kind=BufferKind.STATE)
        return tuple(found)

    def _add(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        self._numbers[tensor.untyped_storage()._cdata] = len(self._buffers)
        self._kept.append(tensor)
        self._buffers.append(buffer)

    def _view(self, name: str, tensor: torch.Tensor) -> TensorView:
        buffer, offset = self.place(tensor)
        return TensorView(
            name=name,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            buffer=buffer,
            offset=offset,
        )
