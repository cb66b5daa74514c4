"""Large copies in host memory by several threads, in parts that can be used as they are completed."""

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from threading import get_ident

import numpy as np

from nimblert.calls.turn import inner_threads

PART_NBYTES = 1 << 20
"""The size of a part, which one thread copies."""

_COPIERS = 4
_SMALL_NBYTES = 1 << 18
"""Less is copied by the caller: handing it to another thread takes longer."""


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
                self._parts.append(None if to.nbytes < _SMALL_NBYTES else _threads().submit(np.copyto, to, source))
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


def _threads() -> ThreadPoolExecutor:
    """The threads of this process, started on first use."""
    process = os.getpid()
    if process not in _pools:
        _pools.clear()  # threads of the parent process are not in this one
        count = min(_COPIERS, os.cpu_count() or 1)
        _pools[process] = ThreadPoolExecutor(count, "nimblert-copy", lambda: inner_threads.add(get_ident()))
    return _pools[process]


_pools: dict[int, ThreadPoolExecutor] = {}
