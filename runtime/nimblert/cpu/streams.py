"""The streams of a CPU program: the caller walks one of them, a thread of its own each other one.

A run can be ended anywhere: Ctrl-C raises KeyboardInterrupt at any bytecode of the main thread. So
nothing here relies on two statements being run both: a wait can be begun again, a signal given twice.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Protocol

from nimblert.errors import DeviceMismatchError, InputError
from nimblert.plan import Command

Step = Callable[[], object]
Bound = tuple[Command, Step]

_LONG_S = 0.2
"""How long Ctrl-C may take to have an effect."""


class RunOptions(Protocol):
    """ONNX Runtime's: while ``terminate`` is set, whatever runs with them ends at its next node."""

    terminate: bool


class Worker:
    """A thread that does its work once for each `start`. ``work`` must not raise.

    A daemon: an idle one does not keep the interpreter from ending.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._wanted = 0
        self._finished = 0
        self._ending = False
        self._wake = _locked()
        self._done = _locked()
        self._thread = threading.Thread(target=self._serve, name="nimblert-stream", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the work is done."""
        return self._finished == self._wanted

    def start(self) -> None:
        """Have the work done once more; the worker must be idle."""
        self._wanted += 1
        unlock(self._wake)

    def wait(self) -> None:
        """Return when the worker is idle."""
        while not self.idle:
            self._done.acquire()

    def settle(self) -> None:
        """Return when the worker is idle, even if a `start` or `wait` before was interrupted."""
        if not self.idle:
            unlock(self._wake)
        self.wait()

    def end(self) -> None:
        """Let the thread of an idle worker end."""
        self._ending = True
        unlock(self._wake)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._ending:
                del self._work  # often a method of the object that holds this worker: neither waits for the collector
                return
            if not self.idle:
                self._work()
                self._finished = self._wanted
                unlock(self._done)


class Streams:
    """Bound commands by stream, ready to run, one run at a time.

    ``gates`` are the events: one that nobody has recorded yet is locked. ``options`` are those of
    every launch. ``failures`` are what an op may raise, ``origin`` says in the message which command failed.
    ``dirty``: a run was begun that has not come to its end.
    Raises DeviceMismatchError where a thread cannot be started.
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
        self.failures = failures
        self._origin = origin
        self._halted = False
        self.dirty = False
        self._failed: list[BaseException] = []
        self._workers: list[Worker] = []
        try:
            for stream in streams[1:]:
                self._workers.append(Worker(partial(self._walk_apart, stream)))
        except RuntimeError as exc:
            self.end()
            raise DeviceMismatchError(
                f"the plan has {len(streams)} streams, and a thread for one of them cannot be started ({exc}): "
                f"let this process have more threads, or compile with --streams 1"
            ) from exc

    def run(self, alone: Sequence[Bound] | None = None) -> None:
        """Run every stream, or these commands on the calling thread.

        Raises InputError where an op fails; whatever is raised, all streams have stopped.
        """
        if self.dirty:
            self._recover()
        self.dirty = True
        for gate in self._gates:
            gate.acquire(blocking=False)
        if alone is not None or not self._workers:
            self._walk(self._own if alone is None else alone)
        else:
            self._walk_all()
        if self._failed:
            self._raise()
        self.dirty = False

    def refusal(self, command: Command, failure: Exception) -> InputError:
        """What to raise where a command failed."""
        said = str(failure).rstrip()
        no_memory = isinstance(failure, MemoryError) or "bad_alloc" in said or "to allocate memory" in said
        what = "needs more memory than there is" if no_memory else "failed on these inputs"
        return InputError(f"{self._origin(command, failure)}: {what}: {said}")

    def end(self) -> None:
        """Let the threads end."""
        for worker in self._workers:
            worker.end()

    def close(self) -> None:
        """Stop what an interrupt may have left running, end the threads and wait for that."""
        insist(self._stop)
        self.end()
        for worker in self._workers:
            worker.join()

    def _walk_all(self) -> None:
        try:
            for worker in self._workers:
                worker.start()
            self._walk(self._own)
            for worker in self._workers:
                worker.wait()
        except BaseException:
            insist(self._stop)
            raise

    def _recover(self) -> None:
        """Put all in order after a run that did not come to its end."""
        insist(self._stop)
        self._halted = False
        self._options.terminate = False
        self._failed = []

    def _raise(self) -> NoReturn:
        """Raise what a stream has left for the caller."""
        error = self._failed[0]
        self._failed = []
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _halt(self) -> None:
        """Let every stream stop at its next command, and a loop inside a command at its next node."""
        self._halted = self.dirty = True
        self._options.terminate = True
        for gate in self._gates:
            unlock(gate)

    def _stop(self) -> None:
        """Halt, and return when every stream has stopped."""
        self._halt()
        for worker in self._workers:
            worker.settle()

    def _walk(self, stream: Sequence[Bound]) -> None:
        for command, step in stream:
            if self._halted:
                return
            try:
                step()
            except self.failures as exc:
                error = self.refusal(command, exc)
                error.__cause__ = exc
                self._fail(error)

    def _walk_apart(self, stream: Sequence[Bound]) -> None:
        try:
            self._walk(stream)
        except BaseException as exc:  # noqa: BLE001 - `run` raises it in the caller's thread
            self._fail(exc)

    def _fail(self, error: BaseException) -> None:
        """End the run; what fails after that fails because of it."""
        if not self._halted:
            self._failed.append(error)
            self._halt()


def interruptible(step: Step, options: RunOptions) -> None:
    """Run a step that may never end by itself on another thread, so that Ctrl-C can end it."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            step()
        except BaseException as exc:  # noqa: BLE001 - raised in the caller's thread below
            failed.append(exc)

    worker = Worker(work)
    try:
        worker.start()
        worker.wait()
    except BaseException:
        options.terminate = True
        raise
    finally:
        insist(worker.settle)
        worker.end()
        insist(worker.join)
    if failed:
        raise failed.pop()


class Patient:
    """A step of ``stream`` that Ctrl-C can end, at the price of another thread only where it takes long.

    Python looks for Ctrl-C on the main thread, and not while that is in a step. How long a step takes,
    its first run tells, on another thread: its work is the same on any inputs, unless it ``loops``. A short one
    takes its own place in the stream.
    """

    def __init__(self, step: Step, options: RunOptions, stream: list[Bound], *, loops: bool) -> None:
        self._step = step
        self._options = options
        self._stream = stream
        self._loops = loops

    def __call__(self) -> None:
        """Run it."""
        begin = time.perf_counter()
        if threading.current_thread() is threading.main_thread():
            interruptible(self._step, self._options)
        else:
            self._step()
        if not self._loops and time.perf_counter() - begin < _LONG_S:
            self._stream[:] = [(command, self._step if step is self else step) for command, step in self._stream]


def insist(action: Callable[[], None]) -> None:
    """Do it to the end: a Ctrl-C meanwhile begins it again."""
    while True:
        try:
            action()
        except KeyboardInterrupt:
            continue
        return


def pass_gate(gate: threading.Lock) -> None:
    """Wait until the gate is open and leave it open for the others who wait."""
    gate.acquire()
    unlock(gate)


def unlock(lock: threading.Lock) -> None:
    """Release a lock, whoever holds it; nothing happens where it is open."""
    try:
        lock.release()
    except RuntimeError:  # not `suppress`, which takes a command's time
        return


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
