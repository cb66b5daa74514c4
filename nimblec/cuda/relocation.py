"""Tell pointers from numbers: compare the parameters of two captures in different memory."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nimblec.cuda.allocator import Shift, Zone
from nimblec.errors import UnsupportedModelError
from nimblert.driver import bindings, call
from nimblert.errors import CudaError

_LOWEST_HOST_ADDRESS = 0x5500_0000_0000  # position-independent programs, heaps, libraries, stacks
_LOWEST_POINTER = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Byte ``offset`` of an allocation: the ``index``-th of the capture's zone, or a resident one."""

    index: int
    offset: int
    resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocatedParams:
    """A parameter buffer with zeros where addresses were, and what those addresses pointed to."""

    params: bytes
    targets: tuple[tuple[int, Target], ...]


class Relocator:
    """Classifies the 8-byte words of parameter buffers.

    A word that moved as an allocation did is a pointer to it. A word that moved otherwise is what
    the stack held under padding: zero. A word that stayed is a number, unless it is the address of
    a resident allocation, of memory that CUDA knows and the allocator never saw (which is refused), or
    of other host memory (padding again: kernels cannot reach it).
    """

    def __init__(self, shift: Shift, resident: Zone) -> None:
        self._shift = shift
        self._resident = resident
        self._host = _host_mappings()
        self._registered: dict[int, bool] = {}

    def relocate(self, first: bytes, second: bytes) -> RelocatedParams:
        """The parameters of one launch, from its buffers in the two captures."""
        words = len(first) // 8
        a = np.frombuffer(first, "<u8", words)
        b = np.frombuffer(second, "<u8", words)
        params = bytearray(first)
        targets = []
        for i in np.flatnonzero((a != b) | (a >= _LOWEST_POINTER)).tolist():
            target, keep = self._classify(int(a[i]), int(b[i]))
            if target is not None:
                targets.append((8 * i, target))
            if not keep:
                params[8 * i : 8 * i + 8] = bytes(8)
        return RelocatedParams(params=bytes(params), targets=tuple(targets))

    def locate(self, first: int, second: int) -> Target:
        """What an address known to be one points to."""
        target, _ = self._classify(first, second)
        if target is None:
            raise UnsupportedModelError(f"it uses device memory at {first:#x} that torch did not allocate")
        return target

    def _classify(self, first: int, second: int) -> tuple[Target | None, bool]:
        if first != second:
            found = self._shift.locate(first, second)
            return (Target(index=found[0], offset=found[1]) if found else None), False
        index = self._resident.find(first)
        if index is not None:
            address = self._resident.addresses[index]
            if address not in self._resident.live:
                return None, False
            return Target(index=index, offset=first - address, resident=True), False
        if self._is_registered(first):
            raise UnsupportedModelError(
                f"it is given the address {first:#x} of memory that a library holds outside torch's "
                "allocator, so a plan cannot carry its contents"
            )
        if first >= _LOWEST_HOST_ADDRESS and self._is_host(first):
            return None, False
        return None, True

    def _is_host(self, address: int) -> bool:
        position = int(np.searchsorted(self._host[:, 0], address, side="right")) - 1
        return position >= 0 and address < int(self._host[position, 1])

    def _is_registered(self, address: int) -> bool:
        if address not in self._registered:
            attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            try:
                call("cuPointerGetAttribute", attribute, address)
                self._registered[address] = True
            except CudaError as exc:
                if exc.result != "CUDA_ERROR_INVALID_VALUE":
                    raise
                self._registered[address] = False
        return self._registered[address]


def _host_mappings() -> np.ndarray:
    """[begin, end) of every mapping of this process, ascending: shape (n, 2), uint64."""
    spans = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return np.array([(int(a, 16), int(b, 16)) for a, b in spans], np.uint64)
