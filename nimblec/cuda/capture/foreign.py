"""Device memory that a library allocated without torch, such as cuDNN's counters."""

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
