"""Memory for outputs that callers keep: it comes back for the next one when they let it go."""

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cuda import driver
from nimblert.cuda.driver import NO_TIMING, Context, Handle, call
from nimblert.errors import CudaError
from nimblert.plan import Tensor


class _Pool:
    """Blocks by size. ``context`` is the pool's own: it closes with the last block, which may outlive the pool."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free: dict[int, list[Any]] = {}
        self._out = 0
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._closed = False

    def _take(self, nbytes: int) -> Any:
        """A block that was given back, which is out from now on; None where there is none: `_made` makes it."""
        with self._lock:
            self._out += 1
            free = self._free.get(nbytes)
            return free.pop() if free else None

    def _made(self, nbytes: int) -> Any:
        try:
            return self._new(nbytes)
        except BaseException:
            self._returned()
            raise

    def give_back(self, block: Any, nbytes: int) -> None:
        """Have a block back, for the next one who takes so many bytes."""
        with self._lock:
            if not self._closed and self._is_idle_after(block):
                self._free.setdefault(nbytes, []).append(block)
                self._out -= 1
                return
        self._context.make_current()
        self._release(block)
        self._returned()

    def _returned(self) -> None:
        with self._lock:
            self._out -= 1
            last = self._closed and not self._out
        if last:
            self._context.close()

    def close(self) -> None:
        """Free what nobody has; the rest is freed as it comes back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, {}
            last = not self._out
        self._context.make_current()
        for blocks in free.values():
            for block in blocks:
                self._release(block)
        if last:
            self._context.close()

    def _is_idle_after(self, block: Any) -> bool:
        """Whether the block may be used again, by work that waits for what was given to the GPU until now."""
        raise NotImplementedError

    def _new(self, nbytes: int) -> Any:
        raise NotImplementedError

    def _release(self, block: Any) -> None:
        raise NotImplementedError


class Lent:
    """Memory of a pool that is out: ``address``. It comes back when nobody has this any more."""

    __slots__ = ("__array_interface__", "__weakref__", "_block", "_nbytes", "_pool", "address")
    __array_interface__: dict[str, Any]

    def __init__(self, pool: _Pool, block: Any, nbytes: int, address: int) -> None:
        self._pool, self._block, self._nbytes, self.address = pool, block, nbytes, address

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else it goes with the process
            self._pool.give_back(self._block, self._nbytes)


@dataclass(frozen=True, slots=True)
class HostLayout:
    """A numpy array but for where it is: its dtype, and its interface without the data."""

    dtype: np.dtype
    interface: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The layout of an input or output of a program."""
        dtype = numpy_dtype(tensor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        return cls(dtype, {"version": 3, "typestr": dtype.str, "shape": tensor.shape, "strides": strides})

    def at(self, lent: Lent) -> np.ndarray:
        """The array over that memory, which keeps it."""
        # By the interface and no buffer: an array of ctypes costs ten times as much.
        lent.__array_interface__ = {**self.interface, "data": (lent.address, False)}
        array = np.asarray(lent)
        return array if array.dtype == self.dtype else array.view(self.dtype)


class PageLockedPool(_Pool):
    """Page-locked host memory: a download needs no second copy."""

    def take(self, nbytes: int) -> Lent:
        """So many bytes."""
        address = self._take(nbytes) or self._made(nbytes)
        return Lent(self, address, nbytes, address)

    def _is_idle_after(self, block: Any) -> bool:
        del block  # every download was waited for
        return True

    def _new(self, nbytes: int) -> int:
        return int(call("cuMemHostAlloc", max(nbytes, 1), 0))

    def _release(self, block: Any) -> None:
        driver.bindings().cuMemFreeHost(block)


class DevicePool(_Pool):
    """Device memory. What a caller lets go may still be read by work of its own, which the next use waits for."""

    def take(self, nbytes: int, stream: Handle) -> Lent:
        """So many bytes, for work on ``stream``."""
        used = self._take(nbytes)
        block = used or self._made(nbytes)
        address, event = block
        lent = Lent(self, block, nbytes, address)
        if used:
            call("cuStreamWaitEvent", stream, event, 0)
        return lent

    def _is_idle_after(self, block: Any) -> bool:
        (status,) = driver.bindings().cuCtxRecordEvent(self._context.handle, block[1])
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
    """Memory on a GPU and beside it for the outputs that callers keep."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.host = PageLockedPool(Context(ordinal))
        self.device = DevicePool(Context(ordinal))

    def close(self) -> None:
        """Free what nobody has."""
        self.host.close()
        self.device.close()
