"""Measure runs of a loaded plan, one after the other in each of several threads at once."""

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from nimblec.base.errors import ArgumentError
from nimblert.telemetry import CommandTime

T = TypeVar("T")

PERCENTILES = (50, 90, 95, 99, 99.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The seconds of each run, in any thread (``latencies``), and of the whole measurement (``seconds``)."""

    latencies: np.ndarray = field(repr=False)
    seconds: float

    @property
    def throughput(self) -> float:
        """Runs per second, of all threads together; 0 if there were none."""
        return self.latencies.size / self.seconds if self.seconds else 0.0

    def facts(self) -> dict[str, object]:
        """Return the number of runs, the seconds, the throughput and the summary by name."""
        latency, runs = self.summary(), self.latencies.size
        return {"runs": runs, "seconds": self.seconds, "throughput": self.throughput, "latency": latency}

    def summary(self) -> dict[str, float]:
        """Return the seconds by name: min, p50 to p99.9 and max; nothing if there were no runs."""
        if not self.latencies.size:
            return {}
        percentiles = np.percentile(self.latencies, PERCENTILES)
        named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True)}
        return {"min": float(self.latencies.min()), **named, "max": float(self.latencies.max())}


def measure(calls: Sequence[Callable[[], object]], *, warm_up: float, duration: float) -> Measurement:
    """Repeat each call in a thread of its own, all threads at once.

    Each runs for ``warm_up`` seconds that do not count; when all have, each begins runs for ``duration`` seconds.
    Raises what a call raises, and ArgumentError for no calls or such seconds. On an exception of this thread, such as
    that of Ctrl-C, each thread ends after its current run, which is not waited for.
    """
    if not calls:
        raise ArgumentError("threads: 0, expected at least 1")
    if not 0 <= warm_up < math.inf:
        raise ArgumentError(f"warm-up: {warm_up} seconds, expected a finite number from 0")
    if not 0 < duration < math.inf:
        raise ArgumentError(f"duration: {duration} seconds, expected a finite number above 0")
    warm, ended = threading.Barrier(len(calls)), threading.Event()

    def lane(call: Callable[[], object]) -> tuple[float, float, np.ndarray]:
        """Return when the runs that count began and ended, and the seconds of each."""
        _repeat(call, warm_up, ended)
        warm.wait()
        return _repeat(call, duration, ended)

    pool = ThreadPoolExecutor(len(calls), "nimblec-measure")
    try:
        running = [pool.submit(lane, call) for call in calls]
        lanes = [done.result() for done in as_completed(running)]
    finally:
        ended.set()
        warm.abort()
        pool.shutdown(wait=False)
    first = min(begin for begin, _, _ in lanes)
    return Measurement(
        latencies=np.concatenate([latencies for _, _, latencies in lanes]),
        seconds=max(end - first for _, end, _ in lanes),
    )


def _repeat(call: Callable[[], object], seconds: float, ended: threading.Event) -> tuple[float, float, np.ndarray]:
    latencies = array("d")
    begin = end = time.perf_counter()
    while end - begin < seconds and not ended.is_set():
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        latencies.append(end - start)
    return begin, end, np.array(latencies)


def taking_turns(items: Sequence[T], call: Callable[[T], object]) -> Callable[[], object]:
    """Return a function that calls whichever of the items is free; more threads than items may call it.

    Waiting threads are served in the order in which they came; otherwise a running thread might keep its item.
    """
    lock = threading.Lock()
    free = deque(items)
    waiting: deque[tuple[threading.Lock, list[T]]] = deque()

    def take() -> T:
        with lock:
            if free:
                return free.popleft()
            gate, given = threading.Lock(), list[T]()
            gate.acquire()
            waiting.append((gate, given))
        # The gate opens when an item is given back.
        gate.acquire()
        return given[0]

    def give_back(item: T) -> None:
        with lock:
            if not waiting:
                free.append(item)
                return
            gate, given = waiting.popleft()
        given.append(item)
        gate.release()

    def once() -> None:
        item = take()
        try:
            call(item)
        finally:
            give_back(item)

    return once


def slowest(profiles: Sequence[Sequence[CommandTime]]) -> list[CommandTime]:
    """Return the commands of several profiles of one program, each with its median time, the slowest first."""
    medians = np.median([[time.nanoseconds for time in profile] for profile in profiles], axis=0)
    commands = [replace(time, nanoseconds=round(ns)) for time, ns in zip(profiles[0], medians, strict=True)]
    return sorted(commands, key=lambda time: -time.nanoseconds)
