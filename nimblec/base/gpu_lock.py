"""Timing on a GPU that concurrent compilations share: one at a time, by a lock, and again where it was disturbed.

They would otherwise choose kernels by each other's work. Work that is not timed, such as a model's warm-up, takes no
lock and still disturbs.
"""

import fcntl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import IO

from nimblert.cuda.driver import call

_PAUSE_S = 0.002
_PAUSES = 5000  # ten seconds, not counting time in which this process is stopped itself
_TRIES = 4
_QUIET = 1.03
"""Ratio of the median to the minimum of times of one CUDA graph on a GPU that does nothing else."""
_NOISY = 1.1
"""The ratio above which a median counts as disturbed, where none was quiet: clocks and events alone reach 1.05."""


def undisturbed(sample: Callable[[], Sequence[float]]) -> tuple[float, bool]:
    """Return the median of the times that ``sample`` returns, and whether it is noisy all the same.

    ``sample`` is called while the lock is held. Other work on the GPU only adds to times: where it spreads them,
    sampling is repeated, up to four times in all, and the lowest median counts.
    """
    found = []
    for _ in range(_TRIES):
        with timing_alone():
            times = sample()
        found.append((statistics.median(times), min(times)))
        if found[-1][0] <= _QUIET * found[-1][1]:
            break
    median, least = min(found)
    return median, median > _NOISY * least


@contextmanager
def timing_alone() -> Iterator[None]:
    """Hold the lock on timing kernels on the first GPU.

    Holders keep it for a few milliseconds. After ten seconds, for example because the holder is stopped, the wait
    ends without the lock. Without a writable cache folder, on a file system that has locks, there is none.
    """
    folder = _folder()
    with nullcontext() if folder is None else locked(folder / f"timing-{_gpu()}.lock"):
        yield


def _folder() -> Path | None:
    """Return the user's cache folder; None where the home folder is not known."""
    try:
        return Path.home() / ".cache" / "nimblec"
    except RuntimeError:
        return None


@cache
def _gpu() -> str:
    """Return the GPU's bus address, which is the same in all processes."""
    found: bytes = call("cuDeviceGetPCIBusId", 16, call("cuDeviceGet", 0))
    return found.split(b"\0")[0].decode().replace(":", ".")


@contextmanager
def locked(path: Path, pauses: int = _PAUSES) -> Iterator[None]:
    """Hold a lock on ``path``, which is created if needed.

    Go on without it after that many ``pauses``, and where it cannot be had at all.

    A waiting process holds a second lock, ``path`` with ".next", which has to be taken first: so a process that times
    kernels continuously lets others in.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, turnstile = path.open("wb"), path.with_name(f"{path.name}.next").open("wb")
    except OSError:
        yield
        return
    with file:
        with turnstile:
            lock(turnstile, pauses)
            lock(file, pauses)
        yield


def lock(file: IO[bytes] | int, pauses: int = _PAUSES) -> None:
    """Lock an open file or folder until it is closed; without effect after that many ``pauses``, or without locks."""
    for _ in range(pauses):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError:
            return  # the file system has no locks
        else:
            return
