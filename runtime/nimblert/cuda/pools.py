"""Memory for outputs that callers keep; it is reused when they release it."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cuda import driver
from nimblert.cuda.driver import NO_TIMING, Context, Handle, call
from nimblert.errors import CudaError, InputError
from nimblert.plan import Tensor


class _Pool:
    """Blocks by size: each an address, and an event where it may be shared.

    Taking a block and returning it take no lock, for they are part of every call: `list.pop` and `list.append` are
    single steps. The pool owns ``context``, and closes it with the last block, which may outlive the pool.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free: dict[int, list[tuple[Any, bool]]] = {}
        self._count = 0
        """The number of blocks, free and in use."""
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._closed = False

    def take(self, nbytes: int, stream: Handle, *, is_shared: bool) -> "Lent":
        """A block of ``nbytes``, for work on ``stream``; ``is_shared`` where nobody waits for that."""
        try:
            block, was_shared = self._free[nbytes].pop()
        except (KeyError, IndexError):
            return Lent(self, self._made(nbytes), nbytes, is_shared)
        lent = Lent(self, block, nbytes, was_shared)  # until the wait below is enqueued
        if was_shared:
            call("cuStreamWaitEvent", stream, block[1], 0)
        lent.is_shared = is_shared
        return lent

    def _made(self, nbytes: int) -> Any:
        """A new block. Raises InputError once the pool is closed and all blocks are freed."""
        with self._lock:
            if self._closed and not self._count:
                raise InputError("this plan is closed: load it again")
            self._count += 1
        try:
            try:
                return self._new(nbytes)
            except CudaError:
                self._drain()  # blocks of other sizes may hold the memory
                return self._new(nbytes)
        except BaseException:
            self._gone()
            raise

    def give_back(self, block: Any, nbytes: int, is_shared: bool) -> None:
        """Return a block, for reuse; see `Lent` for ``is_shared``."""
        if is_shared and not self._is_idle_after(block):
            self._end(block)
        else:
            self._free.setdefault(nbytes, []).append((block, is_shared))
        if self._closed:
            self._drain()

    def _drain(self) -> None:
        """Free the blocks that are not in use."""
        for blocks in list(self._free.values()):
            while blocks:
                try:
                    block, _ = blocks.pop()
                except IndexError:  # another thread has it
                    break
                self._end(block)

    def _end(self, block: Any) -> None:
        """Free a block that nobody else has: until it is counted as gone, the context lives.

        A finalizer may do so anywhere in the caller's program, also in a forked process.
        """
        with self._context.within():
            self._release(block)
            self._gone()

    def _gone(self) -> None:
        """Count a block that was freed; with the last one the context is closed, once."""
        with self._lock:
            self._count -= 1
            last = self._closed and not self._count
        if last:
            self._context.close()

    def close(self) -> None:
        """Free the blocks that are not in use; the others are freed when they are returned."""
        with self._lock:
            self._closed = True
            self._count += 1  # as if a block of this method were in use
        self._drain()
        self._gone()

    def _is_idle_after(self, block: Any) -> bool:
        """Whether a shared block may be reused, by work that waits for everything enqueued on the GPU so far."""
        raise NotImplementedError

    def _new(self, nbytes: int) -> Any:
        raise NotImplementedError

    def _release(self, block: Any) -> None:
        raise NotImplementedError


class Lent:
    """A block in use, of ``nbytes`` at ``address``; it returns to its pool when this object is collected.

    ``is_shared``: GPU work that nobody has waited for, such as that of a library which was given it, may still use it.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_block", "_pool", "address", "is_shared", "nbytes")
    __array_interface__: dict[str, Any]

    def __init__(self, pool: _Pool, block: Any, nbytes: int, is_shared: bool) -> None:
        self._pool, self._block, self.nbytes = pool, block, nbytes
        self.address: int = block[0]
        self.is_shared = is_shared

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether so many bytes from this address on lie in the block."""
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else the process frees it
            self._pool.give_back(self._block, self.nbytes, self.is_shared)


def addresses(lent: Sequence[Lent | None]) -> list[int | None]:
    """The address of each block; None where there is none."""
    return [None if memory is None else memory.address for memory in lent]


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The layout of a numpy array: its dtype, and its array interface without the address."""

    dtype: np.dtype
    interface: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The layout of an input or output of a program."""
        dtype = numpy_dtype(tensor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return cls(dtype, {"version": 3, "typestr": dtype.str, "shape": tensor.shape, "strides": strides})

    def at(self, lent: Lent) -> np.ndarray:
        """An array over that memory, which it keeps alive."""
        # By the array interface: a buffer made by ctypes takes ten times as long.
        lent.__array_interface__ = {**self.interface, "data": (lent.address, False)}
        array = np.asarray(lent)
        return array if array.dtype == self.dtype else array.view(self.dtype)


class PageLockedPool(_Pool):
    """Page-locked host memory: a download needs no second copy, and is waited for, so that no block is shared."""

    def _new(self, nbytes: int) -> tuple[int, None]:
        self._context.make_current()  # the caller may be another thread than that of a call
        return int(call("cuMemHostAlloc", max(nbytes, 1), 0)), None

    def _release(self, block: Any) -> None:
        driver.bindings().cuMemFreeHost(block[0])


class DevicePool(_Pool):
    """Device memory. A released block may still be used by work of the caller, which its next use waits for."""

    def _is_idle_after(self, block: Any) -> bool:
        status, *_ = driver.bindings().cuCtxRecordEvent(self._context.handle, block[1])
        return bool(status == 0)  # else it is freed, and that waits for the GPU

    def _new(self, nbytes: int) -> tuple[int, Handle]:
        event = call("cuEventCreate", NO_TIMING)
        try:
            return int(call("cuMemAlloc", max(nbytes, 1))), event
        except CudaError:
            driver.bindings().cuEventDestroy(event)
            raise

    def _release(self, block: Any) -> None:
        address, event = block
        driver.bindings().cuMemFree(address)
        driver.bindings().cuEventDestroy(event)


class Pools:
    """The pools for the outputs of one GPU: page-locked host memory, and device memory."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.host = PageLockedPool(Context(ordinal))
        try:
            self.device = DevicePool(Context(ordinal))
        except BaseException:
            self.host.close()
            raise

    def close(self) -> None:
        """Close both pools."""
        self.host.close()
        self.device.close()
