"""Changes that are made as a whole, whatever signals come meanwhile."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[], object]
Commit: TypeAlias = Callable[[Change], None]
"""Makes a change that is prepared, or raises and has not begun it."""

_Handler: TypeAlias = Callable[[int, Any], Any]

_NUMBERS = tuple(signal.valid_signals())


class _Held:
    """In place of a signal handler: calls it at once, or leaves that to the end of a change."""

    came: list[tuple[_Handler, int]] | None = None
    """What came during the change that is being made."""

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> Any:
        if _Held.came is None:
            return self.handler(number, frame)
        return _Held.came.append((self.handler, number))


def uninterrupted(change: Change) -> None:
    """Make a change; signal handlers, whose exceptions would end it half way, run when it is made.

    Raises what the change raises, or the handlers.
    """
    if threading.current_thread() is not threading.main_thread() or _Held.came is not None:  # where no handlers run
        change()
        return
    came = _Held.came = []
    replaced: dict[int, _Handler] = {}
    interruption: BaseException | None = None
    try:
        while True:
            try:
                _hold_all(replaced)
                break
            except BaseException as exc:  # noqa: BLE001 - of a handler that was not replaced yet, raised below
                interruption = exc
        change()
    finally:
        _Held.came = None
        try:
            for replaced_number, handler in replaced.items():
                signal.signal(replaced_number, handler)
        finally:
            _call(came)
    if interruption is not None:
        try:
            raise interruption
        finally:
            del interruption  # whose traceback has this frame


def _hold_all(replaced: dict[int, _Handler]) -> None:
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler):
            held = handler if isinstance(handler, _Held) else _Held(handler)  # left where an exception came
            replaced[number] = held.handler
            signal.signal(number, held)


def _forget() -> None:
    """A forked process does not end the change of its parent."""
    _Held.came = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _call(came: list[tuple[_Handler, int]]) -> None:
    """Call handlers, the last too where one raises."""
    if came:
        handler, number = came.pop(0)
        try:
            handler(number, None)
        finally:
            _call(came)
