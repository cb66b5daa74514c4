"""Memory of the GPU and page-locked memory: the regions of a program, staging buffers, pools of output blocks."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.layouts import numpy_dtype
from nimblert.cuda import driver
from nimblert.cuda.driver import NO_TIMING, Context, Handle, call
from nimblert.errors import CudaError, InputError
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
    """Return the address of ``nbytes`` of device memory, which is freed with the context."""
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
        """Return the device address of a pointer."""
        return self.bases[pointer.region, pointer.index] + pointer.offset

    def rebased(self, bases: Bases) -> "DeviceMemory":
        """Return this memory with some regions at other addresses."""
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
        """Return the bytes of a tensor, and their address."""
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
    """Return an array over host memory."""
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class BlockPool:
    """Blocks of page-locked host memory, or of memory of the GPU (``on_device``), kept by size.

    Taking and returning a block takes no lock: `list.pop` and `list.append` are single steps. Blocks may outlive
    `close`; the last one to be returned closes the ``context``.
    """

    def __init__(self, context: Context, *, on_device: bool) -> None:
        self._context = context
        self._on_device = on_device
        self._free: dict[int, list[tuple[int, Handle, bool]]] = {}
        """Address, event, and whether work that nobody has waited for may still use it; by size."""
        self._count = 0
        """The number of blocks, free and in use."""
        self._lock = threading.RLock()  # a destructor may run while this thread holds it
        self._closed = False

    def take(self, nbytes: int, stream: Handle = None) -> "PooledBlock":
        """Return a block of ``nbytes``; work on ``stream`` waits for what still uses it. Raises InputError, CudaError.

        The block returns to the pool when the object is collected.
        """
        try:
            address, event, was_shared = self._free[nbytes].pop()
        except (KeyError, IndexError):
            return self._make(nbytes)
        block = PooledBlock(self, address, nbytes, event)
        if was_shared:
            call("cuStreamWaitEvent", stream, event, 0)
        return block

    def _make(self, nbytes: int) -> "PooledBlock":
        with self._lock:
            if self._closed and not self._count:
                raise InputError("this plan is closed: load it again")
            self._count += 1
        self._context.make_current()  # the caller may be another thread than that of a call
        try:
            try:
                return self._allocate(nbytes)
            except CudaError:
                self._drain()  # blocks of other sizes may hold the memory
                return self._allocate(nbytes)
        except BaseException:
            self._count_down()
            raise

    def _allocate(self, nbytes: int) -> "PooledBlock":
        if not self._on_device:
            return PooledBlock(self, int(call("cuMemHostAlloc", max(nbytes, 1), 0)), nbytes, None)
        event = call("cuEventCreate", NO_TIMING)
        try:
            return PooledBlock(self, int(call("cuMemAlloc", max(nbytes, 1))), nbytes, event)
        except CudaError:
            driver.release("cuEventDestroy", event)
            raise

    def give_back(self, address: int, nbytes: int, event: Handle, *, is_shared: bool) -> None:
        """Keep a block for reuse. Work of another library that still uses it is recorded by the block's event."""
        if not is_shared or driver.bindings().cuCtxRecordEvent(self._context.handle, event)[0] == 0:
            self._free.setdefault(nbytes, []).append((address, event, is_shared))
        else:
            self._destroy(address, event)
        if self._closed:
            self._drain()

    def _drain(self) -> None:
        """Free the blocks that are not in use."""
        for blocks in list(self._free.values()):
            while blocks:
                try:
                    address, event, _ = blocks.pop()
                except IndexError:  # another thread has it
                    break
                self._destroy(address, event)

    def _destroy(self, address: int, event: Handle) -> None:
        """Free a block; the last one closes the context. Ignores errors: it may run at any time, in any thread."""
        with self._context.within():
            driver.release("cuMemFree" if self._on_device else "cuMemFreeHost", address)
            if event is not None:
                driver.release("cuEventDestroy", event)
            self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = self._closed and not self._count
        if is_last:
            self._context.close()

    def close(self) -> None:
        """Free the blocks that are not in use; the others are freed when they are returned."""
        with self._lock:
            self._closed = True
            self._count += 1  # keeps the context open while draining
        self._drain()
        self._count_down()


class PooledBlock:
    """A block of ``nbytes`` at ``address``, which returns to its pool when this object is collected.

    ``is_shared``: work on the GPU that nobody has waited for, such as another library's, may still use it.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_pool", "address", "event", "is_shared", "nbytes")
    __array_interface__: dict[str, Any]

    def __init__(self, pool: BlockPool, address: int, nbytes: int, event: Handle) -> None:
        self._pool = pool
        self.address, self.nbytes, self.event = address, nbytes, event
        self.is_shared = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the process frees it.
        if not is_finalizing():
            self._pool.give_back(self.address, self.nbytes, self.event, is_shared=self.is_shared)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The layout of a numpy array: its dtype, and its array interface without the address."""

    dtype: np.dtype
    interface: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the layout of an input or output of a program."""
        dtype = numpy_dtype(tensor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return cls(dtype, {"version": 3, "typestr": dtype.str, "shape": tensor.shape, "strides": strides})

    def over(self, block: PooledBlock) -> np.ndarray:
        """Return an array over a block, which it keeps alive."""
        # By the array interface: a buffer made by ctypes takes ten times as long.
        block.__array_interface__ = {**self.interface, "data": (block.address, False)}
        array = np.asarray(block)
        return array if array.dtype == self.dtype else array.view(self.dtype)
