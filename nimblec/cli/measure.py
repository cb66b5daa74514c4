"""Measure runs of a loaded plan, one after the other in each of several threads at once."""

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from nimblec.base.errors import ArgumentError
from nimblert.telemetry import CommandTime

T = TypeVar("T")

PERCENTILES = (50, 90, 95, 99, 99.9)

_LAST_RUN_S = 0.5
"""The time that an interrupt waits for runs that have begun."""

_LOOK_S = 0.5
"""The longest time that a Ctrl-C just before a wait goes unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """``latencies`` are the seconds of each run, of whichever thread; ``seconds`` passed during all of them.

    ``interrupted``: Ctrl-C came before the time was over; ``unfinished`` threads were still at a run then.
    """

    latencies: np.ndarray = field(repr=False)
    seconds: float
    interrupted: bool = False
    unfinished: int = 0

    @property
    def throughput(self) -> float:
        """Runs per second, of all threads together; 0 if there were none."""
        return self.latencies.size / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, float]:
        """Seconds by name: min, p50 to p99.9 and max; empty if there were no runs."""
        if not self.latencies.size:
            return {}
        percentiles = np.percentile(self.latencies, PERCENTILES)
        named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, percentiles, strict=True)}
        return {"min": float(self.latencies.min()), **named, "max": float(self.latencies.max())}


def measure(calls: Sequence[Callable[[], object]], *, warm_up: float, duration: float) -> Measurement:
    """Repeat each call in a thread of its own, all threads at once.

    Each runs for ``warm_up`` seconds that do not count; when all have, each begins runs for ``duration``
    seconds. Ctrl-C ends both: what was measured until then is the result. Raises what a call raises, and
    ArgumentError for no calls or such seconds.
    """
    if not calls:
        raise ArgumentError("threads: 0, expected at least 1")
    if not 0 <= warm_up < math.inf:
        raise ArgumentError(f"warm-up: {warm_up} seconds, expected a finite number from 0")
    if not 0 < duration < math.inf:
        raise ArgumentError(f"duration: {duration} seconds, expected a finite number above 0")
    course = _Course(len(calls), warm_up, duration)
    lanes = [_Lane(call) for call in calls]
    running: list[Future[None]] = []
    interrupted = False
    pool = ThreadPoolExecutor(len(calls), "nimblec-measure")
    try:
        running.extend(pool.submit(course.run, lane) for lane in lanes)
        course.start()
        _await(running)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        course.end()
        pool.shutdown(wait=False)
    done, unfinished = wait(running, timeout=_LAST_RUN_S if interrupted else None)
    for thread in done:
        thread.result()
    return Measurement(
        latencies=np.concatenate([np.array(lane.latencies[:]) for lane in lanes]),
        seconds=max(0.0, *(lane.end - course.begin for lane in lanes)),
        interrupted=interrupted,
        unfinished=len(unfinished),
    )


def _await(running: Sequence[Future[None]]) -> None:
    """Return when all have ended, or one has raised."""
    while True:
        done, left = wait(running, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
        if not left or any(future.exception() for future in done):
            return


def taking_turns(items: Sequence[T], call: Callable[[T], object]) -> Callable[[], object]:
    """A call on whichever of the items is free, for threads that may outnumber them.

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
        gate.acquire()  # until an item is given
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


class _Lane:
    """The call that one thread repeats, the seconds of each run, and the end of the last one."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.latencies = array("d")
        self.end = 0.0


class _Course:
    """Shared by the threads: they start, begin to count (at ``begin``) and end together."""

    def __init__(self, count: int, warm_up: float, duration: float) -> None:
        self.begin = 0.0
        self._warm_up = warm_up
        self._duration = duration
        self._started = threading.Event()
        self._ended = False
        self._warm = threading.Barrier(count, self._begin)

    def start(self) -> None:
        """Let the threads run: not before all are known, or Ctrl-C might miss one that is at a run."""
        self._started.set()

    def end(self) -> None:
        """Have every thread end after the run that it is at."""
        self._ended = True
        self._started.set()
        self._warm.abort()

    def run(self, lane: _Lane) -> None:
        """The body of a thread."""
        self._started.wait()
        self._repeat(_Lane(lane.call), time.perf_counter(), self._warm_up)
        try:
            self._warm.wait()
        # `end` breaks the barrier.
        except threading.BrokenBarrierError:
            return
        self._repeat(lane, self.begin, self._duration)

    def _begin(self) -> None:
        self.begin = time.perf_counter()

    def _repeat(self, lane: _Lane, begin: float, seconds: float) -> None:
        lane.end = begin
        while lane.end - begin < seconds and not self._ended:
            start = time.perf_counter()
            lane.call()
            lane.end = time.perf_counter()
            lane.latencies.append(lane.end - start)


def slowest(profiles: Sequence[Sequence[CommandTime]]) -> list[CommandTime]:
    """The commands of several profiles of one program, each with its median time, the slowest first."""
    medians = np.median([[time.nanoseconds for time in profile] for profile in profiles], axis=0)
    commands = [replace(time, nanoseconds=round(ns)) for time, ns in zip(profiles[0], medians, strict=True)]
    return sorted(commands, key=lambda time: -time.nanoseconds)
