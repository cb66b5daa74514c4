"""The lock of a context, for one call at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from nimblert.errors import InputError, NimbleError


class CallLock:
    """Lets one call at a time use a context: ``with lock: ...``. Raises InputError where a call cannot begin.

    A call of another thread is waited for if ``waits``, and refused otherwise. Calls are refused within a call, after a
    fork, and once the context is ``closed``. Any exception but a NimbleError closes the context: its state is unknown.
    """

    def __init__(self, noun: str, again: str, *, waits: bool) -> None:
        """Name the owner for messages by ``noun`` and ``again``: "executable", "load the plan again"."""
        self._noun, self._again, self.waits = noun, again, waits
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._is_within = False
        self._is_freed = False
        self.closed: str | None = None
        """Why the context is closed, as the end of a message; None while it is open."""

    def __enter__(self) -> Self:
        if self.closed is not None or os.getpid() != self._process:
            self.check_open()
        if not self._lock.acquire(blocking=self.waits):
            raise InputError(f"this {self._noun} is at work in another thread: each takes one of its own, context()")
        if self._is_within or self.closed is not None:
            within = self._is_within
            self._lock.release()
            if within:
                raise InputError(f"this {self._noun} is at work in this thread: do this when the call has returned")
            self.check_open()
        self._is_within = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, NimbleError):
            self.closed = f", as {kind.__name__} came within a call"
        self._is_within = False
        self._lock.release()

    @property
    def is_busy(self) -> bool:
        """Whether a call is at work, in whichever thread."""
        return self._is_within

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Hold the lock for the block, waiting for the call at work; calls that come meanwhile wait, too."""
        waits, self.waits = self.waits, True
        try:
            with self:
                yield
        finally:
            self.waits = waits

    def check_open(self) -> None:
        """Raise InputError after a fork, and where the context is closed."""
        if os.getpid() != self._process:
            raise InputError(
                f"this {self._noun} was loaded in process {self._process}: load the plan again in this one"
            )
        if self.closed is not None:
            raise InputError(f"this {self._noun} is closed{self.closed}: {self._again}")

    def close(self) -> bool:
        """Let no call begin any more, once the one at work has ended; return whether there is something to free.

        Raises InputError within a call. After a fork there is nothing to free: all belongs to the parent.
        """
        if os.getpid() != self._process:
            return False
        # Calls that come meanwhile find the lock closed.
        waits, self.waits = self.waits, True
        with self._lock:
            if self._is_within:
                self.waits = waits
                raise InputError(f"this {self._noun} is at work in this thread: do this when the call has returned")
            is_first, self._is_freed = not self._is_freed, True
            self.closed = self.closed or ""
            return is_first
