"""Changes that are made as a whole, whatever signals come meanwhile."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from nimblert.calls.turn import inner_threads

Change: TypeAlias = Callable[[], object]
Commit: TypeAlias = Callable[[Change], None]
"""Makes a change that is prepared, or raises and has not begun it."""


def uninterrupted(change: Change) -> None:
    """Make a change in a thread of its own: an exception of a signal handler is raised once it is made.

    Raises what the change raises.
    """
    if threading.current_thread() is not threading.main_thread():  # where no handlers run
        change()
        return
    begins, ends = SimpleQueue[bool](), SimpleQueue[None]()
    outcomes: list[BaseException | None] = []

    def make() -> None:
        error: BaseException | None = None
        inner_threads.add(threading.get_ident())
        try:
            if begins.get():
                change()
        except BaseException as exc:  # noqa: BLE001 - raised below
            error = exc
        finally:
            inner_threads.discard(threading.get_ident())
            outcomes.append(error)
            ends.put(None)

    try:
        threading.Thread(target=make, name="nimblert-change").start()
    except BaseException:
        begins.put(False)
        raise
    interruption: BaseException | None = None
    while not outcomes:
        try:
            begins.put(True)
            ends.get()
        except BaseException as exc:  # noqa: BLE001 - raised below
            interruption = exc
    (error,) = outcomes
    if error is not None:
        raise error
    if interruption is not None:
        raise interruption
