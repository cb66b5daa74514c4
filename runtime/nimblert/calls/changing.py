"""Changes that are made as a whole, whatever signals come meanwhile."""

import _thread
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from nimblert.calls.turn import inner_threads

Change: TypeAlias = Callable[[], object]
Commit: TypeAlias = Callable[[Change], None]
"""Makes a change that is prepared, or raises and has not begun it."""


def uninterrupted(change: Change) -> None:
    """Make a change in a thread of its own: an exception of a signal handler is raised before it or after it.

    Raises what the change raises.
    """
    if _thread.get_ident() != threading.main_thread().ident:  # where no handlers run
        change()
        return
    begins, ends = SimpleQueue[bool](), SimpleQueue[None]()
    outcomes: list[BaseException | None] = []
    wait = partial(_wait, ends, outcomes, os.getpid())

    def make() -> None:
        inner_threads.add(_thread.get_ident())
        error: BaseException | None = None
        try:
            if begins.get():
                change()
        except BaseException as exc:  # noqa: BLE001 - raised below
            error = exc
        outcomes.append(error)
        del error  # whose traceback has this frame
        ends.put(None)
        inner_threads.discard(_thread.get_ident())

    try:
        # Not by `threading`, whose locks may be held by the code that a signal handler has interrupted.
        _thread.start_new_thread(make, ())
    except BaseException:
        begins.put(False)
        raise
    try:
        begins.put(True)
        wait()
    except BaseException:
        try:  # handlers of several signals that came at once may raise one after the other
            wait()
        finally:
            wait()
        raise
    finally:
        error = outcomes.pop() if outcomes else None
        if error is not None:
            try:
                raise error
            finally:
                del error


def _wait(ends: "SimpleQueue[None]", outcomes: list[BaseException | None], process: int) -> None:
    """Wait for an outcome, and raise then what a signal handler has raised meanwhile.

    There is nothing to wait for in a process that a handler has forked from this ``process``.
    """
    interruption: BaseException | None = None
    while not outcomes and os.getpid() == process:
        try:
            ends.get()
        except BaseException as exc:  # noqa: BLE001 - raised below
            interruption = exc
    if interruption is not None:
        try:
            raise interruption
        finally:
            del interruption  # whose traceback has this frame
