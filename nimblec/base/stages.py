"""The stages of a compilation, and observers of their start and end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Observer: TypeAlias = Callable[[str, float | None], None]
"""Called with (stage, None) when a stage starts and with (stage, seconds) when it ends."""


@contextmanager
def stage(observer: Observer, name: str) -> Iterator[None]:
    """Time the block as a stage, which ends where it fails too: another variant may then be tried."""
    observer(name, None)
    begin = time.perf_counter()
    try:
        yield
    finally:
        observer(name, time.perf_counter() - begin)


class Stopwatch:
    """An observer that passes stages on to another one, and keeps their seconds."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.stages: list[tuple[str, float]] = []

    def __call__(self, stage: str, seconds: float | None) -> None:
        """Pass on that a stage starts or ends."""
        if seconds is not None:
            self.stages.append((stage, seconds))
        self._observer(stage, seconds)
