"""The streams of a CPU program: the calling thread runs the first, and a thread of its own each other one.

Where `load(threads=)` allows fewer threads than there are streams, several streams are one here, in issue order.
"""

import enum
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import index
from pathlib import Path
from typing import Protocol, TypeAlias

from nimblert.errors import InputError
from nimblert.plan import Command

Step = Callable[[], object]
Bound = tuple[Command, Step]


class RunOptions(Protocol):
    """ONNX Runtime's RunOptions: while ``terminate`` is set, runs with them end at the next node."""

    terminate: bool


class _Worker:
    """A daemon thread that does its ``work``, which must not raise, once for each `start`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._is_ending = False
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, name="nimblert-stream", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._wake.release()

    def wait(self) -> None:
        self._done.acquire()

    def end(self) -> None:
        self._is_ending = True
        self._wake.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._is_ending:
                return
            self._work()
            self._done.release()


class Streams:
    """Bound commands by stream, ready to run, one run at a time.

    ``gates`` are the events: each is locked until it is recorded. ``options`` are those of every launch. ``failures``
    are the exceptions of an op that fails, and ``origin`` names the command for the message.
    """

    def __init__(
        self,
        streams: Sequence[Sequence[Bound]],
        gates: Sequence[threading.Lock],
        options: RunOptions,
        failures: tuple[type[Exception], ...],
        origin: Callable[[Command, Exception], str],
    ) -> None:
        self._own = streams[0]
        self._gates = gates
        self._options = options
        self._failures = failures
        self._origin = origin
        self._is_halted = False
        self._failed: list[BaseException] = []
        self._workers = [_Worker(partial(self._walk_or_halt, stream)) for stream in streams[1:]]

    def run(self) -> None:
        """Run every stream. Raises InputError where an op fails; whatever is raised, all streams have stopped."""
        if not self._workers:
            self.walk(self._own)
            return
        self._is_halted = self._options.terminate = False
        self._failed.clear()
        for gate in self._gates:
            gate.acquire(blocking=False)
        for worker in self._workers:
            worker.start()
        try:
            self._walk_or_halt(self._own)
        finally:
            for worker in self._workers:
                worker.wait()
        if self._failed:
            # The later ones may only say that the first one has ended their streams.
            raise self._failed.pop(0)

    def walk(self, stream: Sequence[Bound]) -> None:
        """Run commands on the calling thread. Raises InputError where an op fails."""
        for command, step in stream:
            try:
                step()
            except InputError:
                raise
            except self._failures as exc:
                raise refusal(self._origin(command, exc), exc) from exc
            if self._is_halted:
                return

    def _walk_or_halt(self, stream: Sequence[Bound]) -> None:
        try:
            self.walk(stream)
        except BaseException as exc:  # noqa: BLE001 - `run` raises the first one
            self._failed.append(exc)
            self._halt()

    def _halt(self) -> None:
        """Have every stream stop at its next command, and loops within commands at their next node."""
        self._is_halted = self._options.terminate = True
        for gate in self._gates:
            open_gate(gate)

    def close(self) -> None:
        """End the threads."""
        self._halt()
        while self._workers:
            self._workers.pop().end()


def refusal(origin: str, failure: Exception) -> InputError:
    """Return the error to raise where a command failed; ``origin`` names it."""
    said = str(failure).rstrip()
    no_memory = isinstance(failure, MemoryError) or "bad_alloc" in said or "to allocate memory" in said
    what = "needs more memory than there is" if no_memory else "failed on these inputs"
    return InputError(f"{origin}: {what}: {said}")


def pass_gate(gate: threading.Lock) -> None:
    """Wait until the gate is open, and leave it open for other waiters."""
    gate.acquire()
    open_gate(gate)


def open_gate(gate: threading.Lock) -> None:
    """Open a gate; one that is open stays so."""
    if gate.locked():
        try:
            gate.release()
        except RuntimeError:  # another thread has just opened it
            return


Threads: TypeAlias = int | Sequence[int]
"""The number of threads, the caller's included; or a processor for each, of which the first is the caller's, whose
thread is not moved."""

_LARGE_NBYTES = 128 << 10
"""An operator that touches fewer bytes runs on its stream's thread alone: to share it out takes longer."""

_WOKEN_NBYTES = 512 << 10
"""The same for threads that sleep between the runs of their session: to wake them takes longer."""

_BUDGET = 256
"""About the most threads in the pools of all sessions of a program."""

_MOST_THREADS = 1024


class Waiting(enum.Enum):
    """What the threads of a session do while they have no work."""

    SPINNING = enum.auto()
    """Spin for a while after each run, then sleep: ONNX Runtime's default, fastest for one session."""
    SPINNING_IN_RUNS = enum.auto()
    """Spin until the run ends: other sessions need the cores then."""
    SLEEPING = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The threads of a session, and their ``processors``, empty where the system chooses."""

    count: int = 1
    processors: tuple[int, ...] = ()
    waiting: Waiting = Waiting.SLEEPING


def checked(threads: Threads | None) -> tuple[int, tuple[int, ...]]:
    """Return the number of threads, by default that of cores, and their processors. Raises InputError."""
    if threads is None:
        return cores(), ()
    try:
        processors = () if not isinstance(threads, Sequence) else tuple(map(index, threads))
        count = len(processors) if isinstance(threads, Sequence) else index(threads)
    except TypeError as exc:
        raise InputError(f"threads: got {threads!r}, expected a number, or the numbers of processors") from exc
    if not 1 <= count <= _MOST_THREADS:
        raise InputError(f"threads: {count}, expected 1 to {_MOST_THREADS}")
    if missing := [n for n in processors if n not in _processors()]:
        raise InputError(f"threads: processor {missing[0]} is none that this process may use: {sorted(_processors())}")
    return count, processors


def pools(
    touched: Sequence[int], streams: int, wanted: tuple[int, tuple[int, ...]], sessions: Collection[int]
) -> tuple[Pool, ...]:
    """Return a pool for each launch of a program, given the bytes that its largest operator ``touched``.

    ``sessions`` are these bytes for each session of the plan. The threads of one session may spin after a run; those of
    several would take the cores from one another.
    """
    count, processors = wanted
    least = _LARGE_NBYTES if sum(map(is_large, sessions)) == 1 else _WOKEN_NBYTES
    large = [nbytes >= least for nbytes in touched]
    is_only = sum(nbytes >= least for nbytes in sessions) == 1
    each = max(1, min(count // max(streams, 1), _BUDGET // max(sum(large), 1)))
    waiting = Waiting.SPINNING if is_only else Waiting.SPINNING_IN_RUNS
    divided = Pool(count=each, processors=processors[:each] if each == count else (), waiting=waiting)
    pool = divided if each > 1 else Pool()
    return tuple(pool if one else Pool() for one in large)


def streams_by_thread(streams: int, most: int | None) -> list[range]:
    """Return the streams that each thread of a program runs: one each, or more where there may be ``most`` threads."""
    count = min(streams, most or streams)
    return [range(first, streams, count) for first in range(count)]


def is_large(touched_nbytes: int) -> bool:
    """Return whether several threads run an operator faster, despite the time to wake them."""
    return touched_nbytes >= _LARGE_NBYTES


def cores() -> int:
    """Return the number of cores that this process may use; processors that share a core count once."""
    return len({_core(processor) for processor in _processors()})


def _processors() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


@cache
def _core(processor: int) -> str:
    """Return the processors that share a core with this one, as Linux lists them."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return str(processor)
