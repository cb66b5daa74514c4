"""Device memory that a library allocated without torch, such as cuDNN's counters, and memory of this process."""

from bisect import bisect_right
from functools import cached_property
from pathlib import Path

import numpy as np

from nimblec.base.errors import UnsupportedModelError
from nimblert.cuda.driver import bindings, call
from nimblert.errors import CudaError

_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class HostMemoryError(UnsupportedModelError):
    """An address of host memory that the GPU can reach: it may change at any time."""


class ForeignMemory:
    """The allocations seen so far: ``addresses`` and ``sizes`` in order of first use.

    Their meaning is unknown, so a plan keeps their contents as state.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self._known: dict[int, int | None] = {}

    def find(self, address: int) -> int | None:
        """Return the allocation that holds ``address``; None if CUDA knows no memory there.

        Raises HostMemoryError.
        """
        if address not in self._known:
            self._known[address] = self._look_up(address)
        return self._known[address]

    def is_of_process(self, address: int) -> bool:
        """Return whether an address lies in memory of this process: its heap, a stack, a library's variables.

        CUDA reserves most addresses without access, and a pair of numbers looks like one of those.
        """
        first = bisect_right(self._mapped, (address, 1 << 64)) - 1
        return first >= 0 and address < self._mapped[first][1]

    @cached_property
    def _mapped(self) -> list[tuple[int, int]]:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        ranges = (line.partition(" ")[0].split("-") for line in lines if " rw-p " in line)
        return [(int(begin, 16), int(end, 16)) for begin, end in ranges]

    def content(self, index: int) -> memoryview:
        """Return the current contents of an allocation."""
        host = np.empty(self.sizes[index], np.uint8)
        call("cuMemcpyDtoH", host.ctypes.data, self.addresses[index], host.nbytes)
        return host.data

    def _look_up(self, address: int) -> int | None:
        attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        try:
            kind = int(call("cuPointerGetAttribute", attribute, address))
        except CudaError as exc:
            if exc.result != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None
        if kind != _DEVICE_MEMORY:
            raise HostMemoryError(
                f"it is given the address {address:#x} of host memory, which a plan cannot carry: keep what it reads "
                "in a tensor on the device"
            )
        base, nbytes = (int(n) for n in call("cuMemGetAddressRange", address))
        if base not in self.addresses:
            self.addresses.append(base)
            self.sizes.append(nbytes)
        return self.addresses.index(base)
