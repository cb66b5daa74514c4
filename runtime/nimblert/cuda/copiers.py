"""Large copies in host memory by several threads, in parts that can be used as they are completed."""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

PART_NBYTES = 1 << 20
"""The size of a part, which one thread copies."""

_COPIERS = 4


def copied(to: np.ndarray, source: np.ndarray) -> Generator[int, None, None]:
    """Copy bytes, and yield the offset of each part in order once it is copied.

    No thread touches the bytes any more when the generator has ended or was closed.
    """

    def copy(start: int) -> int:
        np.copyto(to[start : start + PART_NBYTES], source[start : start + PART_NBYTES])
        return start

    parts = [_threads().submit(copy, start) for start in range(0, to.nbytes, PART_NBYTES)]
    try:
        for part in parts:
            yield part.result()
    except BaseException:
        for part in parts:
            part.cancel()
        wait(parts)
        raise


def _threads() -> ThreadPoolExecutor:
    """The threads of this process, started on first use."""
    process = os.getpid()
    if process not in _pools:
        _pools.clear()  # threads of the parent process are not in this one
        _pools[process] = ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1), "nimblert-copy")
    return _pools[process]


_pools: dict[int, ThreadPoolExecutor] = {}
