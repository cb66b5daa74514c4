"""Tell an observer when the stages of a compilation begin and end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nimblec.options import Observer


@contextmanager
def stage(observer: Observer, name: str) -> Iterator[None]:
    """Time the block as a stage."""
    observer(name, None)
    begin = time.perf_counter()
    yield
    observer(name, time.perf_counter() - begin)
