"""One process at a time times kernels on a GPU.

Compilations that run beside each other would otherwise time kernels while others of theirs are on the GPU, and choose
by that. What they run without timing it, a model's warm-up for example, still disturbs.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nimblert.driver import call

_PAUSE_S = 0.002
_PAUSES = 5000  # ten seconds, but for the time that this process stands still itself


@contextmanager
def timing_alone() -> Iterator[None]:
    """Wait until no other process times kernels on the first GPU, and keep others waiting.

    They hold the lock for some milliseconds at a time; one that is stopped meanwhile is not waited for longer than ten
    seconds. Where the user's cache folder cannot be written, nobody waits.
    """
    with locked(_folder() / f"timing-{_gpu()}.lock"):
        yield


def _folder() -> Path:
    return Path.home() / ".cache" / "nimblec"


@cache
def _gpu() -> str:
    """Its place on the bus, which all processes see alike."""
    found: bytes = call("cuDeviceGetPCIBusId", 16, call("cuDeviceGet", 0))
    return found.split(b"\0")[0].decode().replace(":", ".")


@contextmanager
def locked(path: Path, pauses: int = _PAUSES) -> Iterator[None]:
    """Hold the lock of a file, which need not exist, or do without it after so many pauses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError:
        yield
        return
    with file:
        for _ in range(pauses):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            else:
                break
        yield
