"""Reports of the capture process: one JSON object per line.

{"stage", "seconds"}, {"note"}, {"problem"}, or as the last {"error", "message"} or {"unforeseen", "traceback"}.
"""

import json
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import IO, Any

from nimblec.base.errors import described, missing_package
from nimblec.base.stages import stage
from nimblert.errors import NimbleError


class Reports:
    """Writes reports to a pipe, whose other end `nimblec.cuda.compile` reads."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._noted: set[str] = set()

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time the block as a stage."""
        return stage(lambda stage, seconds: self._send(stage=stage, seconds=seconds), name)

    def note(self, notes: Iterable[str]) -> None:
        """Send each note once: programs of several sizes have notes in common."""
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                self._send(note=note)

    def problem(self, sentence: str) -> None:
        """Send the reason why the compilation will fail, in case this process dies before it can send the error."""
        self._send(problem=sentence)

    def failure(self, exc: Exception) -> None:
        """Send the exception that ended the compilation; call this in its handler."""
        error = missing_package(exc) or exc if isinstance(exc, ModuleNotFoundError) else exc
        if isinstance(error, NimbleError):
            self._send(error=type(error).__name__, message=str(error))
        else:
            self._send(unforeseen=described(exc), traceback=traceback.format_exc())

    def _send(self, **message: Any) -> None:
        self._pipe.write(json.dumps(message) + "\n")
