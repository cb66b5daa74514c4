"""Device memory of a program: one allocation for each region, the inputs and outputs packed."""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.cuda.driver import Context, call
from nimblert.plan import Pointer, Program, Region, Tensor

_ALIGNMENT = 512
_POISON = 0xFF

DEFAULT_STREAM = 0
"""Where the driver fills memory, and copies from pageable memory. Its calls may return before: runs wait for none."""

Bases: TypeAlias = Mapping[tuple[Region, int], int]
"""Device addresses of regions."""


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def allocate(context: Context, nbytes: int, *, poison: bool = False) -> int:
    """The address of ``nbytes`` of device memory, which is freed with the context."""
    base = int(context.acquire(call("cuMemAlloc", _round_up(nbytes)), "cuMemFree"))
    if poison:
        call("cuMemsetD8", base, _POISON, _round_up(nbytes))
        call("cuStreamSynchronize", DEFAULT_STREAM)
    return base


class DeviceMemory:
    """The regions of one program in device memory: its own inputs and outputs, and the regions ``given``.

    ``poison`` fills inputs and outputs with 0xFF bytes.
    """

    def __init__(self, context: Context, program: Program, given: Bases, *, poison: bool = False) -> None:
        self.bases = dict(given)
        for region, sizes in ((Region.INPUT, program.input_nbytes), (Region.OUTPUT, program.output_nbytes)):
            rounded = [_round_up(nbytes) for nbytes in sizes]
            if rounded:
                base = allocate(context, sum(rounded), poison=poison)
                offsets = accumulate(rounded[:-1], initial=0)
                self.bases |= {(region, index): base + offset for index, offset in enumerate(offsets)}

    def address(self, pointer: Pointer) -> int:
        """The device address of a pointer."""
        return self.bases[pointer.region, pointer.index] + pointer.offset

    def rebased(self, bases: Bases) -> "DeviceMemory":
        """This memory with some regions at other addresses."""
        moved = copy(self)
        moved.bases = {**self.bases, **bases}
        return moved


class Staging:
    """Page-locked host memory that mirrors tensors in device memory, one numpy view for each."""

    def __init__(self, context: Context, tensors: Sequence[Tensor], memory: DeviceMemory) -> None:
        sizes = [_round_up(t.span_nbytes) for t in tensors]
        self._offsets = list(accumulate(sizes, initial=0))
        total = max(self._offsets[-1], 1)
        self._address = int(context.acquire(call("cuMemHostAlloc", total, 0), "cuMemFreeHost"))
        self._host = host_bytes(self._address, total)
        self._tensors = tensors
        self.moved(memory)
        self._nbytes = [t.span_nbytes for t in tensors]
        self.views = tuple(layouts.strided(self.bytes_of(i)[0], t) for i, t in enumerate(tensors))

    def moved(self, memory: DeviceMemory) -> None:
        """Mirror the tensors in this memory from now on."""
        self._devices = [memory.address(t.pointer) for t in self._tensors]

    def bytes_of(self, index: int) -> tuple[np.ndarray, int]:
        """The bytes of a tensor, and their address."""
        start = self._offsets[index]
        return self._host[start : start + self._nbytes[index]], self._address + start

    def upload(self, index: int, stream: object) -> None:
        """Enqueue the copy of one tensor from host to device."""
        if nbytes := self._nbytes[index]:
            call("cuMemcpyHtoDAsync", self._devices[index], self.bytes_of(index)[1], nbytes, stream)

    def to_device(self, stream: object) -> None:
        """Enqueue the copies from host to device."""
        for index in range(len(self._nbytes)):
            self.upload(index, stream)

    def download(self, index: int, stream: object) -> None:
        """Enqueue the copy of one tensor from device to host."""
        if nbytes := self._nbytes[index]:
            call("cuMemcpyDtoHAsync", self.bytes_of(index)[1], self._devices[index], nbytes, stream)

    def to_host(self, stream: object) -> None:
        """Enqueue the copies from device to host."""
        for index in range(len(self._nbytes)):
            self.download(index, stream)


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """An array over host memory."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
