"""Threads that start together or wait for each other, and how many there are."""

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(i)`` in each of ``count`` threads, and return the results."""
    barrier = threading.Barrier(count, timeout=60)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def compilations() -> int:
    """Return the number of parallel compilations of a test process: its share of the cores, at most eight."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(share, 8))


def thread_count() -> int:
    """Count the threads of this process, those of libraries too, after a garbage collection."""
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def threads_beyond(before: int, *, patience_s: float = 10.0) -> int:
    """Count the threads more than ``before``; the system takes a moment to end one that was joined."""
    deadline = time.monotonic() + patience_s
    while (more := thread_count() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return max(0, more)
