"""The streams of a CPU program: the calling thread runs the first, and a thread of its own each other one.

Where `load(threads=)` allows fewer threads than there are streams, several streams are one here, in issue order.

A run can be interrupted anywhere: Ctrl-C raises KeyboardInterrupt at any bytecode of the main thread. So nothing here
relies on two statements both being executed: a wait can be repeated, and a signal sent twice. And the caller never
sleeps for long: a signal that comes just before a thread sleeps on a lock does not wake it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Protocol

from nimblert.calls.turn import inner_threads
from nimblert.errors import DeviceMismatchError, InputError
from nimblert.plan import Command

Step = Callable[[], object]
Bound = tuple[Command, Step]

_LONG_S = 0.2
"""How long Ctrl-C may take to take effect."""


class RunOptions(Protocol):
    """ONNX Runtime's RunOptions: while ``terminate`` is set, runs with them end at the next node."""

    terminate: bool


class Worker:
    """A thread that does its work once for each `start`. ``work`` must not raise.

    It is a daemon: idle, it does not keep the interpreter from ending.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._wanted = 0
        self._finished = 0
        self._ending = False
        self._wake = _locked()
        self._done = _locked()
        self._thread = threading.Thread(target=self._serve, name="nimblert-stream", daemon=True)

    def begin(self) -> None:
        """Start the thread. Raises RuntimeError where that is not possible."""
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether the work is done."""
        return self._finished == self._wanted

    def start(self) -> None:
        """Do the work once more; the worker must be idle."""
        self._wanted += 1
        unlock(self._wake)

    def wait(self) -> None:
        """Return when the worker is idle."""
        while not self.idle:
            self._done.acquire(True, _LONG_S)

    def settle(self) -> None:
        """Return when the worker is idle, even if a `start` or `wait` before was interrupted."""
        if not self.idle:
            unlock(self._wake)
        self.wait()

    def end(self) -> None:
        """Tell the thread of an idle worker to end."""
        self._ending = True
        unlock(self._wake)

    def join(self) -> None:
        """Wait until the thread has ended, if it has begun."""
        if self._thread.ident is not None:
            self._thread.join()

    def _serve(self) -> None:
        inner_threads.add(threading.get_ident())
        try:
            self._serve_calls()
        finally:
            inner_threads.discard(threading.get_ident())

    def _serve_calls(self) -> None:
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

    ``gates`` are the events: each is locked until it is recorded. ``options`` are those of every launch. ``failures``
    are the exceptions of an op that fails, and ``origin`` names the command for the message. ``dirty``: the last run
    was not completed. The threads run from `start` to `close` or `end`.
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
        self._workers = [Worker(partial(self._walk_apart, stream)) for stream in streams[1:]]

    def start(self) -> None:
        """Start the threads, or none: raises DeviceMismatchError where one cannot be started."""
        try:
            for worker in self._workers:
                worker.begin()
        except BaseException as exc:
            self.end()
            if not isinstance(exc, RuntimeError):
                raise
            raise DeviceMismatchError(
                f"the plan has {1 + len(self._workers)} streams, and a thread for one of them cannot be started "
                f"({exc}): let this process have more threads, or compile with --streams 1"
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
        """The error to raise where a command failed."""
        said = str(failure).rstrip()
        no_memory = isinstance(failure, MemoryError) or "bad_alloc" in said or "to allocate memory" in said
        what = "needs more memory than there is" if no_memory else "failed on these inputs"
        return InputError(f"{self._origin(command, failure)}: {what}: {said}")

    def end(self) -> None:
        """Tell the threads to end."""
        for worker in self._workers:
            worker.end()

    def close(self) -> None:
        """Stop what an interrupt may have left running, and wait for the threads to end."""
        complete(self._close)

    def _close(self) -> None:
        self._stop()
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
            try:
                complete(self._stop)
            finally:
                complete(self._stop)  # as in `complete`
            raise

    def _recover(self) -> None:
        """Reset everything after a run that was not completed."""
        complete(self._stop)
        self._halted = False
        self._options.terminate = False
        self._failed = []

    def _raise(self) -> NoReturn:
        """Raise the first error of a stream."""
        error = self._failed[0]
        self._failed = []
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _halt(self) -> None:
        """Have every stream stop at its next command, and loops within commands at their next node."""
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
        """End the run; later failures are consequences of the first."""
        if not self._halted:
            self._failed.append(error)
            self._halt()


def interruptible(step: Step, options: RunOptions) -> None:
    """Run a step that might never end on another thread, so that Ctrl-C can end it.

    Where no thread can be started, the step runs on this one, and Ctrl-C waits for its end.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            step()
        except BaseException as exc:  # noqa: BLE001 - raised in the caller's thread below
            failed.append(exc)

    worker = Worker(work)

    def end() -> None:
        if not worker.idle:
            options.terminate = True
        worker.settle()
        worker.end()
        worker.join()

    try:
        try:
            worker.begin()
        except RuntimeError:
            step()
            return
        worker.start()
        worker.wait()
    finally:
        try:
            complete(end)
        finally:
            complete(end)  # as in `complete`
    if failed:
        raise failed.pop()


class Patient:
    """A step that Ctrl-C can end, the next of ``stream``; only a long one needs another thread for that.

    Python handles Ctrl-C on the main thread, but not during a step. The first run, on another thread, measures the
    step, whose work does not depend on the inputs unless it ``loops``. A short step then replaces this object in the
    stream.
    """

    def __init__(self, step: Step, options: RunOptions, stream: list[Bound], *, loops: bool) -> None:
        self._step = step
        self._options = options
        self._stream = stream
        self._place = len(stream)
        self._loops = loops

    def __call__(self) -> None:
        """Run it."""
        begin = time.perf_counter()
        if threading.current_thread() is threading.main_thread():
            interruptible(self._step, self._options)
        else:
            self._step()
        if not self._loops and time.perf_counter() - begin < _LONG_S:
            replaced = slice(self._place, self._place + 1)
            self._stream[replaced] = [(command, self._step) for command, _ in self._stream[replaced]]


def complete(action: Callable[[], None]) -> None:
    """Complete an action: an exception of a signal handler is raised once it is done.

    It is repeated after each exception; of several, the last is raised, with the others as its context.
    """
    try:
        action()
    except BaseException:
        try:
            complete(action)
        finally:
            action()  # where the handler of another signal has raised before that has begun
        raise


def pass_gate(gate: threading.Lock) -> None:
    """Wait until the gate is open, and leave it open for other waiters."""
    while not gate.acquire(True, _LONG_S):
        pass
    unlock(gate)


def unlock(lock: threading.Lock) -> None:
    """Release a lock, whoever holds it; do nothing where it is open."""
    try:
        lock.release()
    except RuntimeError:  # not `suppress`, which takes a command's time
        return


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
