"""Memory for outputs that callers keep: it comes back for the next one when they let it go."""

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from nimblert import driver
from nimblert.driver import NO_TIMING, Context, Handle, call


class _Pool:
    """Blocks by size. ``context`` is the pool's own: it closes with the last block, which may outlive the pool."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free: dict[int, list[Any]] = {}
        self._out = 0
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._closed = False

    def _take(self, nbytes: int, make: Callable[[], Any]) -> tuple[Any, bool]:
        """A block, and whether it was used before."""
        with self._lock:
            found = self._free.get(nbytes)
            self._out += 1
            if found:
                return found.pop(), True
        try:
            return make(), False
        except BaseException:
            self._returned()
            raise

    def _give_back(self, block: Any, nbytes: int) -> None:
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

    def _release(self, block: Any) -> None:
        raise NotImplementedError


class PageLockedPool(_Pool):
    """Page-locked host memory: a download needs no second copy."""

    def take(self, nbytes: int) -> tuple[int, np.ndarray]:
        """The address of so many bytes, and the array over them that keeps them."""
        address, _ = self._take(nbytes, lambda: int(call("cuMemHostAlloc", max(nbytes, 1), 0)))
        block = _Bytes(address, nbytes)
        weakref.finalize(block, self._give_back, address, nbytes).atexit = False
        return address, np.asarray(block)

    def _is_idle_after(self, block: Any) -> bool:
        del block  # every download was waited for
        return True

    def _release(self, block: Any) -> None:
        driver.bindings().cuMemFreeHost(block)


class _Bytes:
    """Bytes that numpy makes an array of, and keeps."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._bytes = (ctypes.c_uint8 * nbytes).from_address(address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = np.ctypeslib.as_array(self._bytes).__array_interface__
        return interface


class DevicePool(_Pool):
    """Device memory. What a caller lets go may still be read by work of its own, which the next use waits for."""

    def take(self, nbytes: int, stream: Handle) -> tuple[int, object]:
        """The address of so many bytes for work on ``stream``, and the object that keeps them."""
        (address, event), used = self._take(nbytes, lambda: _device_block(nbytes))
        if used:
            call("cuStreamWaitEvent", stream, event, 0)
        keeper = _Keeper()
        weakref.finalize(keeper, self._give_back, (address, event), nbytes).atexit = False
        return address, keeper

    def _is_idle_after(self, block: Any) -> bool:
        (status,) = driver.bindings().cuCtxRecordEvent(self._context.handle, block[1])
        return bool(status == 0)  # else it is freed, and that waits for the GPU

    def _release(self, block: Any) -> None:
        address, event = block
        driver.bindings().cuMemFree(address)
        driver.bindings().cuEventDestroy(event)


class _Keeper:
    """Lives as long as a block is in use."""


def _device_block(nbytes: int) -> tuple[int, Handle]:
    return int(call("cuMemAlloc", max(nbytes, 1))), call("cuEventCreate", NO_TIMING)
