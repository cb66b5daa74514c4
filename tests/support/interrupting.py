"""Code that runs in the midst of a call, in its thread, as signal handlers and finalizers do."""

import sys
from collections.abc import Callable
from typing import Any

from nimblert import InputError
from nimblert.calls.turn import Turn

WITHIN = "is at work in this thread, which a signal handler or a finalizer has interrupted"


def interrupted(turn: Turn, call: Callable[[], Any], action: Callable[[], object]) -> tuple[Any, str]:
    """What a call gives, and the message of the error that ``action`` raises in the midst of it."""
    found: list[str] = []

    def handler(*_: object) -> None:
        try:
            action()
            found.append("none")
        except InputError as exc:
            found.append(str(exc))

    def note(*_: object) -> None:
        if turn.lock.locked():
            sys.setprofile(None)
            handler()

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    (message,) = found
    return result, message


def interrupted_at(place: int, call: Callable[[], object]) -> bool:
    """Raise KeyboardInterrupt at one of the places of a call where signals are handled; False where it has fewer.

    These are the starts of functions, and the ends of those that are not written in Python.
    """
    left = place

    def count(_: object, event: str, function: object) -> None:
        nonlocal left
        if event == "call" or (event == "c_return" and function is not sys.setprofile):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return left <= 0
