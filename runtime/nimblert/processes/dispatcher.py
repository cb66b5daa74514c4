"""The thread of a pool that gives calls to its processes and takes their answers.

Callers only wait. If each spoke to a process itself, its thread would give up the GIL and wait to get it back several
times in a call: 64 threads that call two GPUs make half as many calls a second.
"""

import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from nimblert.errors import DeviceLostError, InputError, NimbleError
from nimblert.processes.channel import DONE, Channel, begin, ends, error_of, opened
from nimblert.processes.layout import Layout
from nimblert.processes.process import Process, Slot

if TYPE_CHECKING:
    import numpy as np

_LARGE_NBYTES = 1 << 20
"""The arrays of calls with more bytes are copied by further threads, so that other calls need not wait for that."""

_COPIERS = 4

_EVENTS = 16
"""The most that are taken from the sockets at once."""

_CONTAINERS = 32
"""More than the pool's thread makes from one `Call` to the next."""

_Then: TypeAlias = Callable[[Any, Exception | None], None]
"""Takes a result, or the error that came instead."""


class Task:
    """What a caller waits for; ``is_over`` once it has an outcome, and then ``done`` is called."""

    __slots__ = ("_done", "_error", "_result", "_waiting", "is_over")

    def __init__(self, done: Callable[[], object] | None = None) -> None:
        """Without ``done`` a thread may `wait`."""
        self.is_over = False
        self._result: Any = None
        self._error: Exception | None = None
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._done = done or self._waiting.release

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait, once, until it is over, and return whether it is: on a lock that nobody else takes."""
        return self._waiting.acquire(timeout=timeout_s)

    def end(self, result: Any, error: Exception | None) -> None:
        """Give it its outcome."""
        self._result, self._error = result, error
        self.is_over = True
        self._done()

    def outcome(self) -> Any:
        """The result. Raises the error that came instead."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # whose traceback has this frame


class Call(Task):
    """A call, whose outcome is the outputs by name, new arrays. ``is_dropped``: nobody waits for it any more."""

    __slots__ = ("arrays", "is_dropped", "layout", "results")

    def __init__(self, layout: Layout, arrays: Sequence[Any], done: Callable[[], object] | None = None) -> None:
        super().__init__(done)
        self.layout, self.arrays = layout, arrays
        self.results: dict[str, np.ndarray] = {}
        self.is_dropped = False
        # A garbage collection that is due takes place here, and not in the pool's thread, which makes fewer containers:
        # finalizers of the user's objects may take locks that the callers hold for whom that thread works.
        [set() for _ in range(_CONTAINERS)]  # lists would be used again, and not be counted


class Exclusive(Task):
    """A function to be called while no call is in flight; what it returns is the outcome."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function


class Dispatcher:
    """Gives each call to the process with the fewest in flight, in the order in which they came.

    A thread of its own has all the state, and speaks to the slots. Other threads leave it tasks, and wait for these:
    they take no lock, so that a signal handler may do what the code that it interrupts was about.
    """

    def __init__(self, processes: Sequence[Process], at_end: Callable[[], object]) -> None:
        """``at_end`` is called at the end, and may close the slots.

        Raises InputError where this process may not have so many files.
        """
        self.processes = self._all = tuple(processes)
        """Those in service."""
        self.waiting: deque[Call] = deque()
        """The calls that have not begun."""
        self.is_closed = False
        self._at_end = at_end
        self._stopped = self._is_over = False
        self._holder: int | None = None
        self._exclusive: deque[Exclusive] = deque()
        """Those that wait, and the one that has begun, which is the first."""
        self._is_exclusive = False
        """Whether one has begun."""
        self._ends: deque[Task] = deque()
        """What waits for the end."""
        self._idle: list[None] = []
        """Not empty while the thread waits, or is about to, and could begin a call: who then has one rings, and empties
        it. Each wait has a list of its own, so that an interrupted caller cannot empty that of a later one."""
        self._calls: dict[Slot, Call] = {}
        """Those in flight."""
        self._sent: set[Slot] = set()
        """The slots whose calls have no answer yet."""
        self._lost: set[Slot] = set()
        """The slots whose process has ended during the call, until it is known how."""
        bell, heard = ends()
        self._bell, self._heard = Channel(bell), Channel(heard)
        self._slots = {slot.channel.file: slot for process in processes for slot in process.slots}
        try:
            self._poll = opened(select.epoll)
        except BaseException:
            for channel in (self._bell, self._heard):
                channel.end()
            raise
        for file in (self._heard.file, *self._slots):
            self._poll.register(file, select.EPOLLIN)
        self._posted: deque[Callable[[], None]] = deque()
        self._copies: SimpleQueue[tuple[Callable[[], Any], _Then] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="nimblert-pool", daemon=True)]
        for _ in range(_COPIERS):
            self._threads.append(threading.Thread(target=self._copy, name="nimblert-pool-copy", daemon=True))
        started = 0
        try:
            for thread in self._threads:
                begin(thread)
                started += 1
        except BaseException:
            self._at_end, self._stopped = tuple, True
            if started:
                self._ring()
            else:
                self._finish()
            raise

    def submit(self, task: Call | Exclusive) -> None:
        """Have something done. Raises InputError where the pool is closed."""
        if self._holder == threading.get_ident():
            raise InputError("this pool can no longer be used: the interpreter is shutting down")
        if self.is_closed and self._holder is None:
            raise _closed()
        if self._is_within():
            raise InputError(
                "this pool cannot be used in its own thread, where the garbage collector has called a finalizer: do "
                "what it does before the object is dropped"
            )
        queue: deque[Any] = self.waiting if isinstance(task, Call) else self._exclusive
        queue.append(task)
        idle = self._idle
        if idle or self.is_closed or not self.processes or queue is self._exclusive:
            self._ring()
            idle.clear()
        if self._stopped and self._holder is None:
            try:
                queue.remove(task)
            except ValueError:  # the thread has seen it, and refused it
                return
            raise _closed()

    def lose(self, process: Process) -> None:
        """Give a process no more calls; it ends if it has not."""
        self._post(partial(self._lose, process))

    def close(self) -> None:
        """Wait for the calls in flight, and end; later ones raise InputError, and so do those that have not begun."""
        self.is_closed = True
        self._wait_for_end()

    def hold(self, timeout_s: float) -> None:
        """Wait for the calls in flight, let none begin any more, and end: other threads wait for ever.

        This one, which ends the interpreter, is refused.
        """
        self._holder = threading.get_ident()
        if not self._wait_for_end(timeout_s):
            self.stop()

    def stop(self) -> None:
        """End, whatever is in flight."""
        self._stopped = True
        self._wait_for_end()

    def _wait_for_end(self, timeout_s: float = -1) -> bool:
        """Whether it has ended in time. A finalizer that has interrupted a thread of its own does not wait."""
        task = Task()
        self._ends.append(task)
        self._ring()
        return self._is_over or self._is_within() or task.wait(timeout_s)

    def _is_within(self) -> bool:
        return threading.current_thread() in self._threads

    def _ring(self) -> None:
        """Wake the thread."""
        with suppress(BlockingIOError):  # there are unheard rings already
            self._bell.send(b"\0")

    def _post(self, function: Callable[[], None]) -> None:
        """Have the thread call a function."""
        self._posted.append(function)
        self._ring()

    # The thread:

    def _run(self) -> None:
        try:
            while not self._may_end():
                self._step()
        finally:
            self._finish()

    def _may_end(self) -> bool:
        is_asked = self.is_closed or self._holder is not None
        return self._stopped or (is_asked and not (self._calls or self._is_exclusive))

    def _step(self) -> None:
        """Begin what can begin, wait for something to happen, and handle it."""
        self._idle = [None]  # before the look for calls, so that none is missed
        if not self._begin_waiting():
            self._idle = []
        ready = self._poll.poll(maxevents=_EVENTS)
        self._idle = []
        for file, _ in ready:
            if file in self._slots:
                self._receive(self._slots[file])
            else:
                self._heard.receive()
        while self._posted:
            self._posted.popleft()()

    def _finish(self) -> None:
        """End everything."""
        self.is_closed = self._stopped = True
        if self._holder is None:  # else threads wait for ever
            self._refuse_waiting()
            for slot in tuple(self._calls):
                self._end(slot, None, _closed())
        for _ in range(_COPIERS):
            self._copies.put(None)
        for channel in (self._bell, self._heard):
            channel.end()
        self._poll.close()
        try:
            self._at_end()
        finally:
            self._is_over = True
            while self._ends:
                self._ends.popleft().end(None, None)

    def _begin_waiting(self) -> bool:
        """Begin what can begin; whether one more call could begin."""
        if self._holder is not None or self._is_exclusive:
            return False
        if self._refusal() is not None:
            self._refuse_waiting()
            return False
        if self._exclusive:
            if not self._calls:
                self._is_exclusive = True
                self._copies.put((self._exclusive[0].function, self._end_exclusive))
            return False
        while (process := self._idlest()) is not None:
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
                self._copies.put((partial(slot.put, call.layout, call.arrays), partial(self._send, slot)))
            else:
                self._send(slot, *_tried(slot.put, call.layout, call.arrays))
        return False

    def _end_exclusive(self, result: Any, error: Exception | None) -> None:
        self._is_exclusive = False
        self._exclusive.popleft().end(result, error)

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
            self._end(slot, None, error)
        else:
            self._free(slot)
            self.waiting.appendleft(call)  # for another process
            self._lose(slot.process)

    def _receive(self, slot: Slot) -> None:
        message = slot.channel.receive()
        is_sent = slot in self._sent
        self._sent.discard(slot)
        if not message:
            self._poll.unregister(slot.channel.file)
            self._lose(slot.process)
            if is_sent:
                self._lost.add(slot)
                self._end_lost()
        elif is_sent:
            call = self._calls[slot]
            if message != DONE:
                told, error = _tried(error_of, message)
                self._end(slot, None, error or told)
            elif call.layout.outputs_nbytes > _LARGE_NBYTES:
                self._copies.put((partial(slot.get, call.layout, call.results), partial(self._end, slot)))
            else:
                self._end(slot, *_tried(slot.get, call.layout, call.results))

    def _end(self, slot: Slot, _: None, error: Exception | None) -> None:
        call = self._free(slot)
        call.end(call.results, error)

    def _free(self, slot: Slot) -> Call:
        """The call of a slot, which may take another one."""
        slot.process.free.append(slot)
        return self._calls.pop(slot)

    def _lose(self, process: Process) -> None:
        if process in self.processes:
            self.processes = tuple(other for other in self.processes if other is not process)
            self._copies.put((process.how, partial(self._note, process)))

    def _note(self, process: Process, _: Any, error: Exception | None) -> None:
        """Note how a process has ended."""
        if process.ended is None:
            process.ended = f"its process has ended, and it is not known how ({error})"
        self._end_lost()

    def _end_lost(self) -> None:
        """End the calls of processes of which it is known how they have ended."""
        for slot in [slot for slot in self._lost if slot.process.ended is not None]:
            self._lost.remove(slot)
            then = "later calls go to the other devices" if self.processes else "load the plan again"
            how = f"device {slot.process.device}: {slot.process.ended} during this call: {then}"
            self._end(slot, None, DeviceLostError(how))

    def _refusal(self) -> NimbleError | None:
        """Why nothing can begin any more, once that is known."""
        if self.is_closed:
            return _closed()
        return None if self.processes else none_left(self._all)

    def _refuse_waiting(self) -> None:
        """End what has not begun."""
        for queue in (self.waiting, self._exclusive):
            while queue:
                queue.popleft().end(None, self._refusal())

    def _copy(self) -> None:
        """What the other threads do."""
        while (work := self._copies.get()) is not None:
            function, then = work
            self._posted.append(partial(then, *_tried(function)))
            del work, function, then  # which keep arrays alive
            self._ring()


def none_left(processes: Sequence[Process]) -> DeviceLostError | None:
    """The error of a pool without devices, once it is known how all these processes have ended."""
    if any(process.ended is None for process in processes):
        return None
    how = "; ".join(f"device {process.device}: {process.ended}" for process in processes)
    return DeviceLostError(f"no device of this pool is in service ({how}): load the plan again")


def _closed() -> InputError:
    return InputError("this pool is closed: load the plan again")


def _tried(function: Callable[..., Any], *args: object) -> tuple[Any, Exception | None]:
    """What a function returns, or the exception that it raises."""
    try:
        return function(*args), None
    except Exception as exc:  # noqa: BLE001 - the caller of the pool gets it
        return None, exc
