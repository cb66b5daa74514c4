"""Large copies in host memory by several threads, in parts that can be used as they are completed."""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import numpy as np

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
    with closing(each_copied(pairs)) as done:
        for index in done:
            yield starts[index]


def each_copied(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Generator[int, None, None]:
    """As `copied`, for bytes of several arrays, each of them with the place that it is copied to: yield the index."""
    parts = [None if to.nbytes < _SMALL_NBYTES else _threads().submit(np.copyto, to, source) for to, source in pairs]
    try:
        for index, part in enumerate(parts):
            if part is None:
                np.copyto(*pairs[index])
            else:
                part.result()
            yield index
    except BaseException:
        begun = [part for part in parts if part is not None and not part.cancel()]
        wait(begun)
        raise


def _threads() -> ThreadPoolExecutor:
    """The threads of this process, started on first use."""
    process = os.getpid()
    if process not in _pools:
        _pools.clear()  # threads of the parent process are not in this one
        _pools[process] = ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1), "nimblert-copy")
    return _pools[process]


_pools: dict[int, ThreadPoolExecutor] = {}
