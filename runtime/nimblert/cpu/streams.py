"""The streams of a CPU program: the calling thread runs the first, and a thread of its own each other one.

Where `load(threads=)` allows fewer threads than there are streams, several streams are one here, in issue order.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from nimblert.errors import InputError
from nimblert.plan import Command

Step = Callable[[], object]
Bound = tuple[Command, Step]


class RunOptions(Protocol):
    """ONNX Runtime's RunOptions: while ``terminate`` is set, runs with them end at the next node."""

    terminate: bool


class _Worker:
    """A daemon thread that does its ``work``, which must not raise, once for each `start`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._is_ending = False
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, name="nimblert-stream", daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._wake.release()

    def wait(self) -> None:
        self._done.acquire()

    def end(self) -> None:
        self._is_ending = True
        self._wake.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._is_ending:
                return
            self._work()
            self._done.release()


class Streams:
    """Bound commands by stream, ready to run, one run at a time.

    ``gates`` are the events: each is locked until it is recorded. ``options`` are those of every launch. ``failures``
    are the exceptions of an op that fails, and ``origin`` names the command for the message.
    """

    def __init__(
        self,
        streams: Sequence[Sequence[Bound]],
        gates: Sequence[threading.Lock],
        options: RunOptions,
        failures: tuple[type[Exception], ...],
        origin: Callable[[Command, Exception], str],
    ) -> None:
        self._own = streams[0]
        self._gates = gates
        self._options = options
        self._failures = failures
        self._origin = origin
        self._is_halted = False
        self._failed: list[BaseException] = []
        self._workers = [_Worker(partial(self._walk_or_halt, stream)) for stream in streams[1:]]

    def run(self) -> None:
        """Run every stream. Raises InputError where an op fails; whatever is raised, all streams have stopped."""
        if not self._workers:
            self.walk(self._own)
            return
        self._is_halted = self._options.terminate = False
        self._failed.clear()
        for gate in self._gates:
            gate.acquire(blocking=False)
        for worker in self._workers:
            worker.start()
        try:
            self._walk_or_halt(self._own)
        finally:
            for worker in self._workers:
                worker.wait()
        if self._failed:
            # The later ones may only say that the first one has ended their streams.
            raise self._failed.pop(0)

    def walk(self, stream: Sequence[Bound]) -> None:
        """Run commands on the calling thread. Raises InputError where an op fails."""
        for command, step in stream:
            try:
                step()
            except self._failures as exc:
                raise self._refusal(command, exc) from exc
            if self._is_halted:
                return

    def _walk_or_halt(self, stream: Sequence[Bound]) -> None:
        try:
            self.walk(stream)
        except BaseException as exc:  # noqa: BLE001 - `run` raises the first one
            self._failed.append(exc)
            self._halt()

    def _halt(self) -> None:
        """Have every stream stop at its next command, and loops within commands at their next node."""
        self._is_halted = self._options.terminate = True
        for gate in self._gates:
            open_gate(gate)

    def _refusal(self, command: Command, failure: Exception) -> InputError:
        """Return the error to raise where a command failed."""
        said = str(failure).rstrip()
        no_memory = isinstance(failure, MemoryError) or "bad_alloc" in said or "to allocate memory" in said
        what = "needs more memory than there is" if no_memory else "failed on these inputs"
        return InputError(f"{self._origin(command, failure)}: {what}: {said}")

    def close(self) -> None:
        """End the threads."""
        self._halt()
        while self._workers:
            self._workers.pop().end()


def pass_gate(gate: threading.Lock) -> None:
    """Wait until the gate is open, and leave it open for other waiters."""
    gate.acquire()
    open_gate(gate)


def open_gate(gate: threading.Lock) -> None:
    """Open a gate; one that is open stays so."""
    if gate.locked():
        try:
            gate.release()
        except RuntimeError:  # another thread has just opened it
            return
