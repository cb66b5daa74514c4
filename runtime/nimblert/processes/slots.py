"""Which slot a call takes: one on the device with the fewest calls in flight, or the first that becomes free."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from nimblert.errors import DeviceLostError, InputError
from nimblert.processes.process import Process, Slot


class Slots:
    """The slots of all processes of a pool. Threads wait for one in the order in which they came."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = self._all = tuple(processes)
        """Those in service."""
        self._closed = False
        self._exclusive = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[SimpleQueue[Slot | None]] = deque()

    def take(self) -> Slot:
        """A slot for a call. Raises InputError where the pool is closed, DeviceLostError where no device is left."""
        waiter: SimpleQueue[Slot | None] = SimpleQueue()
        try:
            with self._lock:
                self.check()
                self._waiting.append(waiter)
                self._serve()
            slot = waiter.get()
        except KeyboardInterrupt:
            self._withdraw(waiter)
            raise
        if slot is None:
            with self._lock:
                self.check()
        assert slot is not None
        return slot

    def _withdraw(self, waiter: "SimpleQueue[Slot | None]") -> None:
        """Wait no longer."""
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        if not waiter.empty() and (slot := waiter.get()) is not None:
            self.give(slot)

    def give(self, slot: Slot) -> None:
        """Give a slot back after its call; after an interrupted one it is free when that has ended."""
        if slot.is_open:
            threading.Thread(target=self._drain, args=(slot,), daemon=True).start()
            return
        process = slot.process
        with self._lock:
            process.in_flight -= 1
            process.free.append(slot)
            self._serve()

    def _drain(self, slot: Slot) -> None:
        slot.drain()
        self.give(slot)

    def lose(self, process: Process) -> None:
        """Give a process that has ended no more calls."""
        with self._lock:
            self.processes = tuple(other for other in self.processes if other is not process)
            self._serve()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the calls in flight, and let no more begin until the block ends."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or not self._exclusive)
            self.check()
            self._exclusive = True
        try:
            with self._lock:
                self._changed.wait_for(self._are_idle)
            yield
        finally:
            with self._lock:
                self._exclusive = False
                self._serve()
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the calls in flight; later ones raise InputError, and so do those that wait for a slot."""
        with self._lock:
            self._closed = True
            self._serve()
            self._changed.wait_for(lambda: self._are_idle() and not self._exclusive)

    def hold(self, timeout_s: float) -> None:
        """Wait for the calls in flight, and let none begin any more: their threads wait for ever."""
        with self._lock:
            self._exclusive = True
            self._changed.wait_for(self._are_idle, timeout_s)

    def _are_idle(self) -> bool:
        return not any(process.in_flight for process in self._all)

    def check(self) -> None:
        """Raise InputError where the pool is closed, DeviceLostError where no device is left."""
        if self._closed:
            raise InputError("this pool is closed: load the plan again")
        if not self.processes:
            how = "; ".join(f"device {one.device}: {one.ended or 'its process has ended'}" for one in self._all)
            raise DeviceLostError(f"no device of this pool is in service ({how}): load the plan again")

    def _idlest(self) -> Slot | None:
        """A free slot of the process with the fewest calls in flight; of several, of that with the fewest so far."""
        if self._exclusive:
            return None
        best = None
        for process in self.processes:
            if process.free and (best is None or _load(process) < _load(best)):
                best = process
        if best is None:
            return None
        best.in_flight += 1
        best.given += 1
        return best.free.pop()

    def _serve(self) -> None:
        """Give free slots to the threads that wait; None to all of them if there will be none."""
        ended = self._closed or not self.processes
        while self._waiting and (ended or (slot := self._idlest()) is not None):
            self._waiting.popleft().put(None if ended else slot)
        if ended or self._exclusive:
            self._changed.notify_all()


def _load(process: Process) -> tuple[int, int]:
    return process.in_flight, process.given
