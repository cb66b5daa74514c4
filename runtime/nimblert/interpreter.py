"""Loaded plans at the end of the interpreter, and in forked processes."""

import atexit
import ctypes
import os
import time
import weakref
from typing import Protocol, TypeVar

T = TypeVar("T")

_LAST_RUN_S = 10.0
"""How long the interpreter, shutting down, waits for the runs of daemon threads."""


class Loaded(Protocol):
    """A context."""

    def hold(self, timeout_s: float) -> None:
        """Wait for the run of another thread, and let no more begin."""

    def holdings(self) -> tuple[object, ...]:
        """The objects that own threads and sessions."""


live: weakref.WeakSet[Loaded] = weakref.WeakSet()
"""All contexts."""


def copied(objects: "weakref.WeakSet[T]") -> tuple[T, ...]:
    """Those of a set to which other threads may add meanwhile."""
    while True:
        try:
            return tuple(objects)
        except RuntimeError as exc:
            if "changed size" not in str(exc):  # by another thread, which has added one
                raise


@atexit.register
def _wait_for_runs() -> None:
    """Wait for the runs of daemon threads, and let no more begin.

    A thread that returned from ONNX Runtime after the interpreter has ended would abort the process.
    """
    end_at = time.monotonic() + _LAST_RUN_S
    held: list[Loaded] = []
    while found := [loaded for loaded in copied(live) if loaded not in held]:
        for loaded in found:  # an executable may make spare contexts until it is held
            loaded.hold(max(0.0, end_at - time.monotonic()))
        held += found


def _keep_for_ever() -> None:
    """Free nothing in a forked child: the destructor of a session waits for threads that only the parent has."""
    for loaded in copied(live):
        for kept in loaded.holdings():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)
