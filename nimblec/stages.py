"""Report the start and end of a compilation's stages to an observer."""

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
