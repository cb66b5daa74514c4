"""Large copies in the host's memory by several threads, of which each part can be used as soon as it is there."""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

PART_NBYTES = 1 << 20
"""What a thread copies at once."""

_COPIERS = 4


def copied(to: np.ndarray, source: np.ndarray) -> Generator[int, None, None]:
    """Copy bytes to others: where each part begins when it is there, in order.

    When the generator has ended, or is closed before that, no thread reads or writes any of them.
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
    """Made in each process when they are first needed."""
    process = os.getpid()
    if process not in _pools:
        _pools.clear()  # those of the process that forked this one are not here
        _pools[process] = ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1), "nimblert-copy")
    return _pools[process]


_pools: dict[int, ThreadPoolExecutor] = {}
