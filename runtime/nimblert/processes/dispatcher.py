"""The thread of a pool that gives calls to its processes and takes their answers.

Callers only wait. If each spoke to a process itself, its thread would give up the GIL and wait to get it back several
times in a call: 64 threads that call two GPUs make half as many calls a second.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from nimblert.errors import DeviceLostError, InputError, NimbleError
from nimblert.processes.channel import DONE, Channel, ends, error_of
from nimblert.processes.layout import Layout
from nimblert.processes.process import Process, Slot

_LARGE_NBYTES = 1 << 20
"""The arrays of calls with more bytes are copied by further threads, so that other calls need not wait for that."""

_COPIERS = 4

_LOOK_S = 0.001
"""How often a thread looks whether it is known how the last process has ended."""

_Then: TypeAlias = Callable[[Any, Exception | None], None]
"""Takes a result, or the error that came instead."""


class Call:
    """A call and, once ``done`` has been called, its outcome.

    ``is_dropped``: nobody waits for it any more.
    """

    __slots__ = ("_error", "_results", "arrays", "done", "is_dropped", "layout")

    def __init__(self, layout: Layout, arrays: Sequence[Any], done: Callable[[], object]) -> None:
        self.layout, self.arrays, self.done = layout, arrays, done
        self.is_dropped = False
        self._results: dict[str, np.ndarray] = {}
        self._error: Exception | None = None

    def end(self, results: dict[str, np.ndarray], error: Exception | None) -> None:
        """Tell the caller."""
        self._results, self._error = results, error
        self.done()

    def outcome(self) -> dict[str, np.ndarray]:
        """The results, new arrays. Raises the error of the call."""
        error, self._error = self._error, None
        if error is None:
            return self._results
        try:
            raise error
        finally:
            del error  # whose traceback has this frame


class Dispatcher:
    """Gives each call to the process with the fewest in flight, in the order in which they came.

    Only its own thread speaks to the slots, until `stop`. No thread holds a lock while it waits for a call, so that a
    signal handler may use the pool.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        """Raises InputError where this process may not have so many files."""
        self.processes = self._all = tuple(processes)
        """Those in service."""
        self.waiting: deque[Call] = deque()
        """The calls that have not begun."""
        self.is_closed = False
        self._exclusive = self._stopped = False
        self._holder: int | None = None
        self._then: Callable[[], object] | None = None
        self._idle: list[None] = []
        """Not empty while the thread waits, or is about to, and could begin a call: who then has one rings, and empties
        it. Each wait has a list of its own, so that an interrupted caller cannot empty that of a later one."""
        self._lock = threading.RLock()
        """Taken by ``with``, and not that of the condition: no exception of a signal handler leaves it locked."""
        self._changed = threading.Condition(self._lock)
        self._calls: dict[Slot, Call] = {}
        """Those in flight."""
        self._sent: set[Slot] = set()
        """The slots whose calls have no answer yet."""
        self._lost: set[Slot] = set()
        """The slots whose process has ended during the call, until it is known how."""
        bell, heard = ends()
        self._bell, self._heard = Channel(bell), Channel(heard)
        self._slots = {slot.channel.file: slot for process in processes for slot in process.slots}
        self._poll = select.epoll()
        for file in (self._heard.file, *self._slots):
            self._poll.register(file, select.EPOLLIN)
        self._posted: deque[Callable[[], None]] = deque()
        self._tasks: SimpleQueue[tuple[Callable[[], Any], _Then] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nimblert-pool", daemon=True)
        copiers = [threading.Thread(target=self._copy, name="nimblert-pool-copy", daemon=True) for _ in range(_COPIERS)]
        for thread in (self._thread, *copiers):
            thread.start()

    def submit(self, call: Call) -> None:
        """Have a call made. Raises InputError where the pool is closed, DeviceLostError where no device is left."""
        self.check()
        self.waiting.append(call)
        idle = self._idle
        if self._stopped:
            self._refuse_waiting()
        elif idle or self.is_closed or not self.processes:
            self._ring()
            idle.clear()

    def check(self) -> None:
        """Raise InputError where the pool is closed, DeviceLostError where no device is left."""
        if self._holder == threading.get_ident():
            raise InputError("this pool can no longer be used: the interpreter is shutting down")
        while not (self.processes or self._are_known()):
            time.sleep(_LOOK_S)  # without a lock, as a signal handler may come here, too
        error = self._refusal()
        if error is not None:
            raise error

    def _refusal(self) -> NimbleError | None:
        if self._holder is not None:
            return None  # calls wait
        if self.is_closed:
            return InputError("this pool is closed: load the plan again")
        if not self.processes:
            how = "; ".join(f"device {one.device}: {one.ended}" for one in self._all)
            return DeviceLostError(f"no device of this pool is in service ({how}): load the plan again")
        return None

    def lose(self, process: Process) -> None:
        """Give a process no more calls; it ends if it has not."""
        with self._lock:
            if process not in self.processes:
                return
            self.processes = tuple(other for other in self.processes if other is not process)
        self._tasks.put((process.how, lambda *_: self._end_lost()))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the calls in flight, and let no more begin until the block ends. Raises as `check` does."""
        with self._lock:
            self._changed.wait_for(lambda: self.is_closed or not self._exclusive)
            self.check()
            self._exclusive = True
        try:
            with self._lock:
                self._changed.wait_for(lambda: not self._calls)
            yield
        finally:
            with self._lock:
                self._exclusive = False
                self._changed.notify_all()
            self._ring()

    def close(self) -> None:
        """Wait for the calls in flight; later ones raise InputError, and so do those that have not begun."""
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()
        self._ring()
        with self._lock:
            if self._holder is None:
                self._changed.wait_for(lambda: not (self._calls or self._exclusive))

    def hold(self, timeout_s: float) -> None:
        """Wait for the calls in flight, and let none begin any more: other threads wait for ever.

        This one, which ends the interpreter, is refused.
        """
        with self._lock:
            self._holder = threading.get_ident()
            self._changed.wait_for(lambda: not self._calls, timeout_s)

    def stop(self, then: Callable[[], object]) -> None:
        """End the thread, and call ``then``, which may close the slots; twice is harmless."""
        if threading.current_thread() is self._thread:  # a finalizer has interrupted it
            self._then = then
        self.is_closed = self._stopped = True
        self._ring()
        if self._then is None:
            self._thread.join()
            then()

    def _ring(self) -> None:
        """Wake the thread."""
        with suppress(BlockingIOError):  # there are unheard rings already
            self._bell.send(b"\0")

    # The thread:

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._step()
        finally:
            self.is_closed = self._stopped = True
            self._finish()

    def _step(self) -> None:
        """Begin the calls that can begin, wait for something to happen, and handle it."""
        self._idle = [None]  # before the look for calls, so that none is missed
        if not self._begin_waiting():
            self._idle = []
        ready = self._poll.poll()
        self._idle = []
        for file, _ in ready:
            if file in self._slots:
                self._receive(self._slots[file])
            else:
                self._heard.receive()
        while self._posted:
            self._posted.popleft()()

    def _finish(self) -> None:
        """End the other threads, and whatever is left."""
        self._refuse_waiting()
        error = self._refusal()
        if error is not None:
            for slot in tuple(self._calls):
                self._end(slot, {}, error)
        for _ in range(_COPIERS):
            self._tasks.put(None)
        for channel in (self._bell, self._heard):
            channel.end()
        self._poll.close()
        if self._then is not None:
            self._then()

    def _begin_waiting(self) -> bool:
        """Begin the calls that wait; whether one more could begin."""
        if self.is_closed or self._are_known():
            self._refuse_waiting()
        while True:
            with self._lock:
                process = None if self._exclusive or self._holder is not None else self._idlest()
                if process is None:
                    return False
                try:
                    call = self.waiting.popleft()
                except IndexError:
                    return True
                if call.is_dropped:
                    continue
                slot = process.free.pop()
                process.given += 1
                self._calls[slot] = call
            if call.layout.inputs_nbytes > _LARGE_NBYTES:
                self._tasks.put((partial(slot.put, call.layout, call.arrays), partial(self._send, slot)))
            else:
                self._send(slot, *_tried(slot.put, call.layout, call.arrays))

    def _idlest(self) -> Process | None:
        """The process with the fewest calls in flight that has a free slot; of several, that with the fewest so far."""
        free = [process for process in self.processes if process.free]
        if len(free) < 2:
            return free[0] if free else None
        return min(free, key=lambda process: (process.in_flight, process.given))

    def _send(self, slot: Slot, _: Any, error: Exception | None) -> None:
        """Tell the process of a call whose inputs have been put."""
        call = self._calls[slot]
        sent = False
        if error is None:
            sent, error = _tried(slot.channel.send, call.layout.message)
        if sent:
            self._sent.add(slot)
        elif error is not None:
            self._end(slot, {}, error)
        else:
            self._free(slot)
            self.waiting.appendleft(call)  # for another process
            self.lose(slot.process)

    def _receive(self, slot: Slot) -> None:
        message = slot.channel.receive()
        is_sent = slot in self._sent
        self._sent.discard(slot)
        if not message:
            self._poll.unregister(slot.channel.file)
            self.lose(slot.process)
            if is_sent:
                self._lost.add(slot)
                self._end_lost()
        elif is_sent:
            layout = self._calls[slot].layout
            if message != DONE:
                told, error = _tried(error_of, message)
                self._end(slot, {}, error or told)
            elif layout.outputs_nbytes > _LARGE_NBYTES:
                self._tasks.put((partial(slot.results, layout), partial(self._end, slot)))
            else:
                self._end(slot, *_tried(slot.results, layout))

    def _end(self, slot: Slot, results: dict[str, np.ndarray] | None, error: Exception | None) -> None:
        self._free(slot).end(results or {}, error)

    def _free(self, slot: Slot) -> Call:
        """The call of a slot, which may take another one."""
        with self._lock:
            slot.process.free.append(slot)
            call = self._calls.pop(slot)
            self._changed.notify_all()
        return call

    def _end_lost(self) -> None:
        """End the calls of processes of which it is known how they have ended."""
        for slot in [slot for slot in self._lost if slot.process.ended is not None]:
            self._lost.remove(slot)
            then = "later calls go to the other devices" if self.processes else "load the plan again"
            how = f"device {slot.process.device}: {slot.process.ended} during this call: {then}"
            self._end(slot, {}, DeviceLostError(how))

    def _are_known(self) -> bool:
        """Whether no process is left, and it is known how all have ended."""
        return not self.processes and all(process.ended is not None for process in self._all)

    def _refuse_waiting(self) -> None:
        """End the calls that have not begun, except at the end of the interpreter."""
        while (error := self._refusal()) is not None:
            try:
                self.waiting.popleft().end({}, error)
            except IndexError:
                return

    def _copy(self) -> None:
        """What the other threads do."""
        while (task := self._tasks.get()) is not None:
            function, then = task
            self._posted.append(partial(then, *_tried(function)))
            del task, function, then  # which keep arrays alive
            self._ring()


def _tried(function: Callable[..., Any], *args: object) -> tuple[Any, Exception | None]:
    """What a function returns, or the exception that it raises."""
    try:
        return function(*args), None
    except Exception as exc:  # noqa: BLE001 - the caller of the pool gets it
        return None, exc
