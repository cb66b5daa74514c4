"""Whose turn it is in a context, and calls that take their turn in one piece."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from nimblert.plan import Program

DirectCall: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""Takes arrays by input name; None, and nothing was done, where the call is not the usual one."""


class Turn:
    """Whose turn it is in a context, and what its last was: ``parts`` runs, the last one of ``program``.

    ``lock`` guards all of it. Calls that were made for a ``state`` are over when it is another object.
    """

    __slots__ = ("lock", "parts", "process", "program", "state")

    def __init__(self, program: Program) -> None:
        self.lock = threading.Lock()
        self.process = os.getpid()
        self.program = program
        self.parts = 1
        self.state = object()


class Relaunch:
    """Launches of a program that was launched before, as long as the context has nothing else to look at.

    ``check`` raises InputError where what is bound is elsewhere by now.
    """

    def __init__(self, turn: Turn, check: Callable[[], None], launch: Callable[[int | None], None]) -> None:
        self._turn, self._state, self._program = turn, turn.state, turn.program
        self._check, self._launch = check, launch

    def __call__(self, stream: Any) -> bool:
        """Launch on a stream of the caller or our own; False, and nothing was done, where this is no such launch."""
        turn = self._turn
        if turn.lock.locked() or not (stream is None or (type(stream) is int and stream >= 0)):
            return False
        with turn.lock:
            same = turn.state is self._state and turn.program is self._program and turn.parts == 1
            if not same or turn.process != os.getpid():
                return False
            self._check()
            self._launch(stream)
            return True
