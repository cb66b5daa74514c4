"""A process of a pool, as the pool sees it: started, called, refitted, ended."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.errors import CudaError, DeviceLostError, InputError, raised_by_handler
from nimblert.processes.channel import Channel, Memory, ends, error_of
from nimblert.processes.layout import Layout, Views

if TYPE_CHECKING:
    from subprocess import Popen

_MAIN = "import sys; sys.path[:] = {path!r}; from nimblert.processes.worker import main; main(sys.argv[1])"
"""What a process runs. It imports what this one would; a script of the user is not imported again."""

_END_S = 10.0
"""How long processes may take to end before they are killed: a driver may have much memory to free."""


class Process:
    """A process with the plan on one device, and its slots, one for each context.

    ``ended`` tells how the process ended, once that is known.
    """

    def __init__(self, device: int, contexts: int, options: Mapping[str, Any], files: Sequence[int]) -> None:
        """Start it with these ``options`` and open ``files``. `answer` waits until it is ready.

        Raises InputError where this process may not have so many files, or cannot start another.
        """
        self.device = device
        self.given = 0
        self.ended: str | None = None
        self.is_over = False
        """Whether what is shared with it is closed."""
        self._ending = threading.Lock()
        with ExitStack() as ours, ExitStack() as theirs:
            given = []
            for _ in range(contexts + 1):
                mine, other = ends()
                ours.callback(mine.close)
                theirs.callback(other.close)
                given.append((mine, other))
            (control, _), *pairs = given
            self.control = Channel(control)
            memories = [Memory() for _ in pairs]
            for memory in memories:
                ours.callback(memory.close)
            self.slots = [Slot(self, Channel(mine), m) for (mine, _), m in zip(pairs, memories, strict=True)]
            self._popen = _popen({**options, "device": device}, [other for _, other in given], memories, files)
            self.free = list(self.slots)
            """The slots without a call; the last is the next to take one."""
            ours.pop_all()

    @property
    def in_flight(self) -> int:
        """The number of its slots that are in use."""
        return len(self.slots) - len(self.free)

    def answer(self, expected: bytes) -> None:
        """Wait for a message of the process. Raises the error that came instead, DeviceLostError where it ended."""
        message = self.control.receive()
        if not message:
            raise DeviceLostError(f"device {self.device}: {self.how()}")
        if message != expected:
            raise error_of(message)

    def how(self) -> str:
        """How the process ended; one that can no longer be used ends now."""
        with self._ending:
            self.control.finish()
            status = self._wait(_END_S)
            if self.ended is None:
                message = self.control.receive()
                error = error_of(message) if message[:1] == b"[" else None
                if isinstance(error, CudaError):
                    self.ended = ended_by(error)
                elif status < 0:
                    self.ended = f"its process was ended by {_signal_name(-status)}"
                else:
                    self.ended = f"its process ended with status {status}"
            return self.ended

    def _wait(self, timeout_s: float) -> int:
        """Its exit status, negative for a signal; one that does not end is killed."""
        from subprocess import TimeoutExpired

        try:
            return self._popen.wait(timeout_s)
        except TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def join(self, end_at: float) -> None:
        """Wait until it has ended, which it does once ``control`` is closed, and close what was shared with it."""
        self._wait(max(0.0, end_at - time.monotonic()))
        self.is_over = True
        for slot in self.slots:
            slot.close()


class Slot:
    """A context of a process: a socket, and shared memory for the arrays of one call at a time."""

    def __init__(self, process: Process, channel: Channel, memory: Memory) -> None:
        self.process, self.channel = process, channel
        self._memory, self._views = memory, Views(memory)

    def put(self, layout: Layout, arrays: Sequence[Any]) -> None:
        """Copy the inputs of a call. Raises InputError where the system has too little memory."""
        for view, array in zip(self._views.of(layout)[0], arrays, strict=True):
            view[...] = array

    def get(self, layout: Layout, results: dict[str, np.ndarray]) -> None:
        """Add copies of the outputs of the last call to ``results``, by name."""
        for place, view in zip(layout.outputs, self._views.of(layout)[1], strict=True):
            results[place.name] = view.copy()

    def close(self) -> None:
        """Close socket and memory."""
        self.channel.end()
        self._memory.close()
        self._memory.unmap()
        self._views = Views(self._memory)


def end(processes: Sequence[Process]) -> None:
    """End processes, whatever they do."""
    left = [process for process in processes if not process.is_over]
    for process in left:
        process.control.end()
    end_at = time.monotonic() + _END_S
    for process in left:
        process.join(end_at)


def ended_by(error: CudaError) -> str:
    """How a process ended whose use of CUDA an error has ended."""
    return f"{error.api}: {error.result} ended its process"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _popen(
    given: Mapping[str, Any], sockets: Sequence[socket.socket], memories: Sequence[Memory], files: Sequence[int]
) -> "Popen[bytes]":
    import subprocess
    from multiprocessing import spawn

    ours, shared = [one.fileno() for one in sockets], [memory.file for memory in memories]
    text = json.dumps({**given, "sockets": ours, "memories": shared}, default=index)
    python = spawn.get_executable()
    hint = "name one by multiprocessing.set_executable, or load the pool without processes=True"
    if not python or (getattr(sys, "frozen", False) and os.fsdecode(python) == sys.executable):
        raise InputError(f"processes: this program has no Python interpreter to start: {hint}")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    command = [python, "-P", *flags, "-c", _MAIN.format(path=_import_path()), text]
    try:
        # In a session of its own, where Ctrl-C in the terminal does not reach it.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(*ours, *shared, *files), start_new_session=True
        )
    except OSError as exc:
        if raised_by_handler(exc):
            raise
        raise InputError(f"processes: {os.fsdecode(python)} cannot be started: {exc.strerror}: {hint}") from exc


def _import_path() -> list[str]:
    """Where a process finds what this one would. Relative folders may be others by now: only this package's is kept."""
    own = str(Path(__file__).resolve().parents[2])
    found = [entry for entry in sys.path if isinstance(entry, str) and Path(entry).is_absolute()]
    return found if own in map(os.path.realpath, found) else [own, *found]
