"""The threads of the sessions of a CPU plan: how many, and what they do while they have no work."""

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import TypeAlias

from nimblert.errors import InputError

Threads: TypeAlias = int | Sequence[int]
"""The number of threads, the caller's included; or a processor for each, of which the first is the caller's, whose
thread is not moved."""

_LARGE_NBYTES = 128 << 10
"""An operator that touches fewer bytes runs on its stream's thread alone: waking others takes longer."""

STEPPED = frozenset({"RNN", "GRU", "LSTM", "com.microsoft.DynamicQuantizeLSTM"})
"""Operators that run alone too: they would wake other threads at each time step (a GRU of 64 steps: 0.9 ms on one
thread, 32 ms on two)."""

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


def pools(large: Sequence[bool], streams: int, wanted: tuple[int, tuple[int, ...]]) -> tuple[Pool, ...]:
    """Return a pool for each session of a program, given whether several threads run it faster."""
    count, processors = wanted
    each = max(1, min(count // max(streams, 1), _BUDGET // max(sum(large), 1)))
    waiting = Waiting.SPINNING if sum(large) == 1 else Waiting.SPINNING_IN_RUNS
    divided = Pool(count=each, processors=processors[:each] if each == count else (), waiting=waiting)
    pool = divided if each > 1 else Pool()
    return tuple(pool if one else Pool() for one in large)


def streams_by_thread(streams: int, most: int | None) -> list[range]:
    """Return the streams that each thread of a program runs: one each, or more where there may be ``most`` threads."""
    count = min(streams, most or streams)
    return [range(first, streams, count) for first in range(count)]


def is_large(operator: str, touched_nbytes: int) -> bool:
    """Return whether several threads run an operator faster, despite the time to wake them."""
    return touched_nbytes >= _LARGE_NBYTES and operator not in STEPPED


def cores() -> int:
    """Return the number of cores that this process may use; processors that share a core count once."""
    return len({_core(processor) for processor in _processors()})


def _processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@cache
def _core(processor: int) -> str:
    """Return the processors that share a core with this one, as Linux lists them."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return str(processor)
