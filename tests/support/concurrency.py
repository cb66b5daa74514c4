"""Threads that start together."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work(i)`` in each of ``count`` threads."""
    barrier = threading.Barrier(count, timeout=60)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))
