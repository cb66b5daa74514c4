"""What a pool and its processes share: sockets, memory, and errors as messages."""

import builtins
import ctypes
import json
import mmap
import os
import socket
from collections.abc import Sequence

import numpy as np

from nimblert import errors
from nimblert.errors import CudaError, InputError, NimbleError, PlanInvalidError

LONGEST_NBYTES = 1 << 17
"""The longest message: one with the sizes of 16,000 axes."""

DONE = b"\0"
"""The answer to a call whose outputs are in memory. Any other is an error."""

PING = b"\1"
"""A message that is sent back as it is."""

READY = b"\2"
"""What a process says once it has loaded the plan."""

_LONGEST_TEXT = 8_000
"""The most characters of an error's text, so that its message is not too long."""

_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

# Keeps the GIL: to get it back from other threads would take longer than the call.
_send = ctypes.PyDLL(None).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


class Channel:
    """One end of a socket between two processes, which carries a message at a time each way."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self._file = socket.fileno()
        self._buffer = memoryview(bytearray(LONGEST_NBYTES))

    def send(self, message: bytes) -> bool:
        """Send a message after the last one was read; False where the other process has ended."""
        return bool(_send(self._file, message, len(message), _FLAGS) == len(message))

    def receive(self) -> bytes:
        """The next message; empty where the other process has ended. Waits without the GIL."""
        try:
            return bytes(self._buffer[: self.socket.recv_into(self._buffer)])
        except ConnectionResetError:  # it ended with a message unread
            return b""

    def end(self) -> None:
        """Close this end, and so tell the other process that this one has ended."""
        self._file = -1
        self.socket.close()


def ends() -> tuple[socket.socket, socket.socket]:
    """The two ends of a new socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Place:
    """Where an array lies in shared memory: bytes ``offset`` to ``end``."""

    __slots__ = ("dtype", "end", "name", "offset", "shape")

    def __init__(self, name: str, dtype: np.dtype, shape: tuple[int, ...], after: int) -> None:
        """Behind ``after`` bytes, aligned as kernels and copies like it."""
        self.name, self.dtype, self.shape = name, dtype, shape
        self.offset = (after + 63) // 64 * 64
        self.end = self.offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))


class Memory:
    """Shared memory without a name: it is freed with the last process that has it, however that ends."""

    def __init__(self, file: int | None = None) -> None:
        """That of another process, given by its ``file``, or new."""
        self.file = os.memfd_create("nimblert") if file is None else file
        self._pages: mmap.mmap | None = None

    def arrays(self, places: Sequence[Place]) -> list[np.ndarray]:
        """Views of it as arrays. Raises InputError where the system has too little memory."""
        pages = self._holding(max((place.end for place in places), default=0))
        return [np.ndarray(place.shape, place.dtype, pages, place.offset) for place in places]

    def _holding(self, nbytes: int) -> mmap.mmap:
        """A map of so many bytes, or more; it shares those of earlier maps."""
        if self._pages is None or len(self._pages) < nbytes:
            if os.fstat(self.file).st_size < max(nbytes, 1):
                try:
                    os.posix_fallocate(self.file, 0, max(nbytes, 1))
                except OSError as exc:
                    raise InputError(
                        f"arrays: {nbytes:,} bytes of shared memory cannot be had: {exc.strerror}: give fewer at once"
                    ) from exc
            self._pages = mmap.mmap(self.file, 0)
        return self._pages

    def clear(self) -> None:
        """Give the memory back. No process may read its views any more."""
        self._pages = None
        os.ftruncate(self.file, 0)

    def close(self) -> None:
        """Close the file; views keep the memory."""
        os.close(self.file)


def error_message(exc: Exception) -> bytes:
    """An error as a message, of which `error_of` makes one of the same class and text in another process."""
    if not isinstance(exc, NimbleError | MemoryError):
        return error_message(NimbleError(f"{type(exc).__name__}: {exc}"))
    text = str(exc)[:_LONGEST_TEXT]
    given = [exc.api, exc.result] if isinstance(exc, CudaError) else [text]
    return json.dumps([type(exc).__name__, *given]).encode()


def error_of(message: bytes) -> Exception:
    """The error in a message of `error_message`."""
    name, *given = json.loads(message)
    if name == PlanInvalidError.__name__:
        return PlanInvalidError(given)
    made: Exception = (getattr(errors, name, None) or getattr(builtins, name))(*given)
    return made
