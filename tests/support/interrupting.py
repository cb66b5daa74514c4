"""Code that runs in the midst of a call, in its thread, as signal handlers and finalizers do."""

import sys
from collections.abc import Callable
from typing import Any

from nimblert import Context, InputError

WITHIN = "is at work in this thread: do this when the call has returned"


def interrupted(context: Context, call: Callable[[], Any], action: Callable[[], object]) -> tuple[Any, str]:
    """Return what a call gives, and the message of the error that ``action`` raises in the midst of it.

    It comes where Python calls a function, as signals do.
    """
    found: list[str] = []

    def note(_: object, event: str, __: object) -> None:
        if event == "call" and context._lock.is_busy:
            sys.setprofile(None)
            try:
                action()
                found.append("none")
            except InputError as exc:
                found.append(str(exc))

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    (message,) = found
    return result, message
