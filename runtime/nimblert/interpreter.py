"""What the end of the interpreter, and a fork, do to what is loaded."""

import atexit
import ctypes
import os
import weakref
from typing import Protocol

_LAST_RUN_S = 10.0
"""How long the end of the interpreter waits for a run of a daemon thread."""


class Loaded(Protocol):
    """A context, as far as this goes."""

    def hold(self, timeout_s: float) -> None:
        """Let the run of another thread end, and no other begin any more."""

    def holdings(self) -> tuple[object, ...]:
        """What has threads and sessions."""


live: weakref.WeakSet[Loaded] = weakref.WeakSet()
"""All that is loaded."""


@atexit.register
def _wait_for_runs() -> None:
    """Let the runs of daemon threads end, and none begin.

    A thread that came back from ONNX Runtime when the interpreter is gone would abort the process.
    """
    held: list[Loaded] = []
    while found := [loaded for loaded in tuple(live) if loaded not in held]:
        for loaded in found:  # until it is held, an executable may make contexts for calls beside its own
            loaded.hold(_LAST_RUN_S)
        held += found


def _keep_for_ever() -> None:
    """In a forked child, let nothing be given back: a session's end waits for threads that no child has."""
    for loaded in tuple(live):
        for kept in loaded.holdings():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)
