"""The stages of a load and their times, for `nimblec run --profile-load` and benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple


class Stage(NamedTuple):
    """A part of a load, from ``begin`` to ``end`` of `time.perf_counter`; threads run some side by side."""

    name: str
    begin: float
    end: float


kept: list[Stage] | None = None
"""The stages so far, in the order in which they ended; None: nobody asks for them."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Keep the time of the block, or of the function that this decorates."""
    begin = perf_counter()
    try:
        yield
    finally:
        if kept is not None:
            kept.append(Stage(name, begin, perf_counter()))
