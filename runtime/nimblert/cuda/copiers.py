"""Large copies in host memory by several threads, in parts that can be used as they are completed."""

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import cache
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import TypeAlias

import numpy as np

from nimblert.calls.turn import inner_threads

PART_NBYTES = 1 << 20
"""The size of a part, which one thread copies."""

_COPIERS = 4
_SMALL_NBYTES = 1 << 18
"""Less is copied by the caller: handing it to another thread takes longer."""

_Part: TypeAlias = tuple[Future[None], np.ndarray, np.ndarray]
"""A copy to an array, from another one."""


def copied(to: np.ndarray, source: np.ndarray) -> Generator[int, None, None]:
    """Copy bytes, and yield the offset of each part in order once it is copied.

    No thread touches the bytes any more when the generator has ended or was closed.
    """
    starts = range(0, to.nbytes, PART_NBYTES)
    pairs = [(to[start : start + PART_NBYTES], source[start : start + PART_NBYTES]) for start in starts]
    with closing(Copying(pairs)) as copying:
        for index in copying:
            yield starts[index]


class Copying:
    """Copies of bytes, each of a pair to its first array, that are begun at once.

    No thread touches the bytes any more once it was closed.
    """

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._pairs = pairs
        self._parts: list[Future[None] | None] = []
        try:
            for to, source in pairs:
                queue = None if to.nbytes < _SMALL_NBYTES else _served()
                part: Future[None] | None = None if queue is None else Future()
                self._parts.append(part)  # before a thread has it: whatever comes between, `close` knows all
                if queue is not None and part is not None:
                    queue.put((part, to, source))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[int]:
        """The index of each pair in order, once it is copied."""
        for index, part in enumerate(self._parts):
            if part is None:
                np.copyto(*self._pairs[index])
            else:
                part.result()
            yield index

    def close(self) -> None:
        """Cancel what was not begun, and wait for the rest."""
        wait([part for part in self._parts if part is not None and not part.cancel()])


def _served() -> "SimpleQueue[_Part] | None":
    """What threads copy from; None where not one can be started: the caller copies."""
    try:
        return _queue()
    except RuntimeError:
        return None


@cache
def _queue() -> "SimpleQueue[_Part]":
    """What the threads of this process are to copy; they are started on first use, as many as can be.

    An executor of `concurrent.futures` takes no work once the main thread has ended. Raises RuntimeError without any.
    """
    queue: SimpleQueue[_Part] = SimpleQueue()
    for started in range(min(_COPIERS, os.cpu_count() or 1)):
        try:
            Thread(target=_copy, args=(queue,), name="nimblert-copy", daemon=True).start()
        except RuntimeError:
            if not started:
                raise
            break
    return queue


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queue.cache_clear)  # the threads are not there


def _copy(queue: "SimpleQueue[_Part]") -> None:
    inner_threads.add(get_ident())
    while True:
        part, to, source = queue.get()
        if part.set_running_or_notify_cancel():
            try:
                np.copyto(to, source)
            except BaseException as exc:  # noqa: BLE001 - raised where the part is awaited
                part.set_exception(exc)
            else:
                part.set_result(None)
        del part, to, source  # which keep arrays alive
