"""What a pool and its processes share: sockets, memory, and errors as messages."""

import builtins
import ctypes
import errno
import fcntl
import json
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from nimblert import errors
from nimblert.errors import CudaError, InputError, NimbleError, PlanInvalidError, raised_by_handler

LONGEST_NBYTES = 1 << 17
"""The longest message: one with the sizes of 16,000 axes."""

DONE = b"\0"
"""The answer to a call whose outputs are in memory. Any other is an error."""

READY = b"\2"
"""What a process says once it has loaded the plan."""

_LONGEST_TEXT = 8_000
"""The most characters of an error's text, so that its message is not too long."""

_LEAST_NBYTES = 1 << 16
"""The least memory that is mapped."""

_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN}
"""The errors of a socket whose other end is closed."""

# Keeps the GIL: to get it back from other threads would take longer than the call.
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


class Channel:
    """One end of a socket between two processes, which carries a message at a time each way."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.file = socket.fileno()
        """Its number; -1 once this end is closed."""
        self._buffer = memoryview(bytearray(LONGEST_NBYTES))

    def send(self, message: bytes) -> bool:
        """Send a message after the last one was read; False where the other process has ended."""
        nbytes = len(message)  # first: no other thread may close the file between its look-up and its use
        if _send(self.file, message, nbytes, _FLAGS) == nbytes:
            return True
        number = ctypes.get_errno()
        if self.file < 0 or number in _GONE:
            return False
        raise OSError(number, os.strerror(number))

    def receive(self) -> bytes:
        """The next message; empty where the other process, or this end, has ended. Waits without the GIL."""
        try:
            return bytes(self._buffer[: self.socket.recv_into(self._buffer)])
        except ConnectionResetError:  # it ended with a message unread
            return b""
        except OSError:
            if self.file < 0:  # a signal handler has closed the pool
                return b""
            raise

    def finish(self) -> None:
        """Send nothing more: the other process reads to the end, and what it has sent can still be read."""
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Close this end, and so tell the other process that this one has ended."""
        self.file = -1
        self.socket.close()


_forking = threading.RLock()
_shared: "weakref.WeakSet[socket.socket | Memory]" = weakref.WeakSet()
"""What a forked process must not keep open: the other processes would not see that this one has ended."""


def ends() -> tuple[socket.socket, socket.socket]:
    """The two ends of a new socket. Raises InputError where this process may not have so many files."""
    with _forking:
        one, other = map(_blocking, opened(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET))
        _shared.update((one, other))
    return one, other


def _blocking(made: socket.socket) -> socket.socket:
    """That socket, whatever `socket.setdefaulttimeout` says, and with a number that no standard stream has."""
    moved = socket.socket(fileno=_moved(made.detach()))
    moved.setblocking(True)
    return moved


def _moved(file: int) -> int:
    """The same file by a number above those of the standard streams, which a new process replaces."""
    if file > 2:
        return file
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(file)
    return moved


def opened(opening: Callable[..., Any], *args: object) -> Any:
    """What a function opens. Raises InputError where this process may not have so many files."""
    try:
        return opening(*args)
    except OSError as exc:
        if exc.errno not in {errno.EMFILE, errno.ENFILE}:
            raise
        raise InputError(
            f"processes: this process has no file left to open ({exc.strerror}), and needs two for each context of "
            "each device, three while the processes start: give fewer contexts, or raise the limit (ulimit -n)"
        ) from exc


def begin(thread: threading.Thread) -> None:
    """Start a thread. Raises InputError where this process may not have so many."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise InputError(
            f"processes: a thread cannot be started ({exc}), and each process needs one for each context, the pool's "
            "own five: give fewer contexts, or let them have more threads and memory"
        ) from exc


class Place:
    """Where an array lies in shared memory: bytes ``offset`` to ``end``."""

    __slots__ = ("dtype", "end", "name", "offset", "shape")

    def __init__(self, name: str, dtype: np.dtype, shape: tuple[int, ...], after: int) -> None:
        """Behind ``after`` bytes, aligned as kernels and copies like it."""
        self.name, self.dtype, self.shape = name, dtype, shape
        self.offset = (after + 63) // 64 * 64
        self.end = self.offset + dtype.itemsize * prod(shape)


class Memory:
    """Shared memory without a name: it is freed with the last process that has it, however that ends."""

    def __init__(self, file: int | None = None) -> None:
        """That of another process, given by its ``file``, or new. Raises InputError as `ends` does."""
        with _forking:
            self.file = _moved(opened(os.memfd_create, "nimblert") if file is None else file)
            self.close = weakref.finalize(self, os.close, self.file)
            """Close the file; views keep the memory."""
            self.close.atexit = False
            _shared.add(self)
        self._pages: mmap.mmap | None = None
        self._had = 0

    def holds(self, places: Sequence[Place]) -> bool:
        """Whether its map does: else `arrays` makes another one, and views of this one keep both."""
        return self._pages is not None and _end(places) <= len(self._pages)

    def arrays(self, places: Sequence[Place]) -> list[np.ndarray]:
        """Views of it as arrays. Raises InputError where the system has too little memory."""
        nbytes = max(_end(places), 1)
        if not self.close.alive:
            raise InputError("this pool is closed: load the plan again")
        try:
            if nbytes > self._had:
                mmap.mmap(-1, nbytes).close()  # refused beyond what the machine has; the file would take all of that
                os.posix_fallocate(self.file, 0, nbytes)
                self._had = nbytes
            if self._pages is None or not self.holds(places):
                mapped = max(_LEAST_NBYTES, 1 << (nbytes - 1).bit_length())  # so that few maps are made
                if os.fstat(self.file).st_size < mapped:
                    os.ftruncate(self.file, mapped)
                self._pages = mmap.mmap(self.file, mapped)
        except (OSError, OverflowError) as exc:
            if raised_by_handler(exc):
                raise
            why = exc.strerror if isinstance(exc, OSError) else "no machine has so many"
            raise InputError(
                f"arrays: {nbytes:,} bytes of shared memory cannot be had: {why}: give fewer at once"
            ) from exc
        return [np.ndarray(place.shape, place.dtype, self._pages, place.offset) for place in places]

    def unmap(self) -> None:
        """Drop its map, which goes with the last view."""
        self._pages = None

    def clear(self) -> None:
        """Give the memory back. No process may read its views any more."""
        self._pages, self._had = None, 0
        os.ftruncate(self.file, 0)


def _end(places: Sequence[Place]) -> int:
    return max((place.end for place in places), default=0)


def _forget() -> None:
    """Close everything in a forked process."""
    for one in tuple(_shared):
        with suppress(OSError):
            one.close()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget)


def error_message(exc: Exception) -> bytes:
    """An error as a message, of which `error_of` makes one of the same class and text in another process."""
    kind = MemoryError if isinstance(exc, MemoryError) else type(exc)  # numpy's is a class of its own
    if kind is not MemoryError and getattr(errors, kind.__name__, None) is not kind:
        return error_message(NimbleError(f"{kind.__name__}: {exc}"))
    text = str(exc)[:_LONGEST_TEXT]
    given = [exc.api, exc.result] if isinstance(exc, CudaError) else [text]
    return json.dumps([kind.__name__, *given]).encode()


def error_of(message: bytes) -> Exception:
    """The error in a message of `error_message`."""
    name, *given = json.loads(message)
    if name == PlanInvalidError.__name__:
        return PlanInvalidError(given)
    made: Exception = (getattr(errors, name, None) or getattr(builtins, name))(*given)
    return made
