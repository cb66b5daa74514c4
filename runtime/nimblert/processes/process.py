"""A process of a pool, as the pool sees it: started, called, refitted, ended."""

import json
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.errors import CudaError, DeviceLostError
from nimblert.processes.channel import DONE, PING, Channel, Memory, ends, error_of
from nimblert.processes.layout import Layout

if TYPE_CHECKING:
    from subprocess import Popen

_MAIN = "import sys; sys.path[:] = {path!r}; from nimblert.processes.worker import main; main(sys.argv[1])"
"""What a process runs. It imports what this one would; a script of the user is not imported again."""

_END_S = 10.0
"""How long a process may take to end before it is killed: a driver may have much memory to free."""

_MOST = 64
"""The most layouts whose views a slot remembers."""

_Views = tuple[list[np.ndarray], list[tuple[str, np.ndarray]]]


class Process:
    """A process with the plan on one device, and its slots, one for each context.

    ``free`` are the slots without a call. ``ended`` tells how the process ended, once that is known.
    """

    def __init__(self, device: int, contexts: int, options: Mapping[str, Any], files: Sequence[int]) -> None:
        """Start it with these ``options`` and open ``files``. `answer` waits until it is ready."""
        self.device = device
        self.in_flight = self.given = 0
        self.ended: str | None = None
        self._ending = threading.Lock()
        pairs = [ends() for _ in range(contexts + 1)]
        memories = [Memory() for _ in range(contexts)]
        self.control = Channel(pairs[0][0])
        self.slots = [Slot(self, Channel(mine), m) for (mine, _), m in zip(pairs[1:], memories, strict=True)]
        self.free = list(self.slots)
        try:
            self._popen = _popen({**options, "device": device}, [theirs for _, theirs in pairs], memories, files)
        except BaseException:
            self.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    def answer(self, expected: bytes) -> None:
        """Wait for a message of the process. Raises the error that came instead, DeviceLostError where it ended."""
        message = self.control.receive()
        if not message:
            raise DeviceLostError(f"device {self.device}: {self.how()}")
        if message != expected:
            raise error_of(message)

    def how(self) -> str:
        """How the process, which has ended or is about to, ended."""
        with self._ending:
            if self.ended is None:
                status = self._wait()
                message = self.control.receive()
                error = error_of(message) if message[:1] == b"[" else None
                if isinstance(error, CudaError):
                    self.ended = f"{error.api}: {error.result} ended its process"
                elif status < 0:
                    self.ended = f"its process was ended by {signal.Signals(-status).name}"
                else:
                    self.ended = f"its process ended with status {status}"
            return self.ended

    def _wait(self) -> int:
        """Its exit status, negative for a signal; one that does not end is killed."""
        from subprocess import TimeoutExpired

        try:
            return self._popen.wait(_END_S)
        except TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def join(self) -> None:
        """Wait until it has ended, which it does once ``control`` is closed, and close what was shared with it."""
        self._wait()
        self.close()

    def close(self) -> None:
        """Close what is shared with it: in a forked process, too, which would keep it alive."""
        self.control.end()
        for slot in self.slots:
            slot.close()


class Slot:
    """A context of a process: a socket, and shared memory for the arrays of one call at a time."""

    def __init__(self, process: Process, channel: Channel, memory: Memory) -> None:
        self.process = process
        self.is_open = False
        """Whether a call was sent, or was about to be, whose answer was not read."""
        self._channel, self._memory = channel, memory
        self._views: dict[Layout, _Views] = {}

    def begin(self, layout: Layout, arrays: Sequence[Any]) -> bool:
        """Give the process a call; False where it has ended."""
        views = (self._views.get(layout) or self._made(layout))[0]
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        self.is_open = True
        self.is_open = self._channel.send(layout.message)
        return self.is_open

    def finish(self, layout: Layout, out: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Wait for the outputs: new arrays, but for those written into ``out``; None where the process has ended.

        Raises the error of the call.
        """
        answer = self._channel.receive()
        self.is_open = False
        if answer != DONE:
            if answer:
                raise error_of(answer)
            return None
        results = {}
        for name, view in self._views[layout][1]:
            if name in out:
                out[name][...] = view
            else:
                results[name] = view.copy()
        return results

    def drain(self) -> None:
        """Wait until the process has nothing more to do with an interrupted call."""
        if self._channel.send(PING):
            while self._channel.receive() not in {PING, b""}:
                pass
        self.is_open = False

    def close(self) -> None:
        """Close socket and memory."""
        self._channel.end()
        self._memory.close()

    def _made(self, layout: Layout) -> _Views:
        if len(self._views) >= _MOST:
            self._views.clear()
        arrays = self._memory.arrays([*layout.inputs, *layout.outputs])
        count = len(layout.inputs)
        names = [place.name for place in layout.outputs]
        made = self._views[layout] = arrays[:count], list(zip(names, arrays[count:], strict=True))
        return made


def end(processes: Sequence[Process]) -> None:
    """End processes, whatever they do."""
    for process in processes:
        process.control.end()
    for process in processes:
        process.join()


def _popen(
    given: Mapping[str, Any], sockets: Sequence[socket.socket], memories: Sequence[Memory], files: Sequence[int]
) -> "Popen[bytes]":
    from multiprocessing import spawn
    from subprocess import DEVNULL, Popen

    ours, shared = [one.fileno() for one in sockets], [memory.file for memory in memories]
    text = json.dumps({**given, "sockets": ours, "memories": shared})
    command = [spawn.get_executable(), "-c", _MAIN.format(path=sys.path), text]
    # In a session of its own, where Ctrl-C in the terminal does not reach it.
    return Popen(command, stdin=DEVNULL, pass_fds=(*ours, *shared, *files), start_new_session=True)
