"""Which slot a call takes: one on the device with the fewest calls in flight, or the first that becomes free.

A slot is in use while its `Lease` lives: what an exception interrupts, at whatever point, cannot lose one. While the
exception lives, its traceback may keep the lease; whoever then closes the pool does not wait for itself.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nimblert.errors import DeviceLostError, InputError
from nimblert.processes.process import Process, Slot

_LOOK_S = 1.0
"""How often a waiting thread looks for itself: a thread that was interrupted may not have told it."""


class Lease:
    """The use of a slot, until `Slots.give`, or until this object is collected."""

    __slots__ = ("__weakref__", "is_over", "ready", "slot", "thread")

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.is_over = False
        self.thread = threading.get_ident()
        self.ready = threading.Lock()
        """Released once there is a slot, or never will be."""
        self.ready.acquire()


class Slots:
    """The slots of all processes of a pool. Threads wait for one in the order in which they came."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = self._all = tuple(processes)
        """Those in service."""
        self._closed = False
        self._exclusive = False
        self._holder: int | None = None
        self._lock = threading.RLock()
        """Taken by ``with`` where it is waited for: then no exception of a signal handler leaves it locked."""
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[weakref.ref[Lease]] = deque()

    def take(self) -> Lease:
        """A slot for a call. Raises InputError where the pool is closed, DeviceLostError where no device is left."""
        self.refuse_within()
        lease = Lease()
        try:
            with self._lock:
                self.check()
                self._waiting.append(weakref.ref(lease, self._collected))
                self._serve()
            while not lease.ready.acquire(timeout=_LOOK_S):
                with self._lock:
                    self._look()
            if lease.slot is None:
                with self._lock:
                    self.check()
        except BaseException:  # whose traceback may keep the lease for long
            self.give(lease)
            raise
        return lease

    def give(self, lease: Lease) -> None:
        """End a lease."""
        with self._lock:
            lease.is_over = True
            slot, lease.slot = lease.slot, None
            if slot is not None:
                _free(slot)
            self._serve()

    def _collected(self, _: "weakref.ref[Lease]") -> None:
        """Serve those that wait after a lease has ended without `give`, unless a thread does so, maybe this one."""
        if self._is_within():
            return
        try:
            if self._lock.acquire(blocking=False):
                self._look()
        finally:
            if self._is_within():
                self._lock.release()

    def _look(self) -> None:
        """Free the slots that are nobody's, since code was interrupted that gave or took them, and serve."""
        for process in self._all:
            for slot in process.slots:
                lease = None if slot.lease is None else slot.lease()
                if slot not in process.free and (lease is None or lease.slot is not slot):
                    _free(slot)
        self._serve()

    def lose(self, process: Process) -> None:
        """Give a process that has ended no more calls."""
        with self._lock:
            self.processes = tuple(other for other in self.processes if other is not process)
            self._serve()

    @contextmanager
    def alone(self, thread: int) -> Iterator[None]:
        """Wait for the calls in flight, but not those of this thread, and let no more begin until the block ends."""
        with self._lock:
            self._wait_for(lambda: self._closed or not self._exclusive)
            self.check()
            self._exclusive = True
        try:
            with self._lock:
                self._wait_for(lambda: self._are_idle(thread))
            yield
        finally:
            with self._lock:
                self._exclusive = False
                self._serve()
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the calls in flight; later ones raise InputError, and so do those that wait for a slot.

        A call of this thread is not waited for: it was interrupted, or this is called by a signal handler.
        """
        self.refuse_within()
        thread = threading.get_ident()
        with self._lock:
            self._closed = True
            self._serve()
            if self._holder is None:
                self._wait_for(lambda: self._are_idle(thread) and not self._exclusive)

    def hold(self, timeout_s: float) -> None:
        """Wait for the calls in flight, and let none begin any more: other threads wait for ever.

        This one, which ends the interpreter, is refused.
        """
        thread = threading.get_ident()
        with self._lock:
            self._holder = thread
            self._changed.wait_for(lambda: self._are_idle(thread), timeout_s)

    def refuse_within(self) -> None:
        """Raise InputError in a signal handler that has interrupted code with the lock."""
        if self._is_within():
            raise InputError("a signal handler has interrupted this pool's own code: use the pool after that")

    def _is_within(self) -> bool:
        """Whether this thread has the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition asks it

    def check(self) -> None:
        """Raise InputError where the pool is closed, DeviceLostError where no device is left."""
        if self._closed:
            raise InputError("this pool is closed: load the plan again")
        if self._holder == threading.get_ident():
            raise InputError("this pool can no longer be used: the interpreter is shutting down")
        if not self.processes:
            how = "; ".join(f"device {one.device}: {one.ended or 'its process has ended'}" for one in self._all)
            raise DeviceLostError(f"no device of this pool is in service ({how}): load the plan again")

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        while not self._changed.wait_for(predicate, _LOOK_S):
            self._look()

    def _are_idle(self, but: int) -> bool:
        """Whether no call is in flight, other than of that thread."""
        leases = (slot.lease() for process in self._all for slot in process.slots if slot.lease is not None)
        return all(lease is None or lease.thread == but for lease in leases)

    def _serve(self) -> None:
        """Give free slots to the threads that wait; none to all of them if there will be none."""
        ended = self._closed or not self.processes
        while self._waiting:
            turn = self._waiting[0]
            lease = turn()
            if lease is not None:
                if not (ended or lease.is_over or lease.slot is not None or self._give_to(lease, turn)):
                    break
                if lease.ready.locked():
                    lease.ready.release()
            self._waiting.popleft()
        if ended or self._exclusive or self._holder is not None:
            self._changed.notify_all()

    def _give_to(self, lease: Lease, turn: "weakref.ref[Lease]") -> bool:
        """Give a lease its slot; False where none is free."""
        slot = self._idlest()
        if slot is None:
            return False
        slot.lease = turn
        lease.slot = slot
        return True

    def _idlest(self) -> Slot | None:
        """A free slot of the process with the fewest calls in flight; of several, of that with the fewest so far."""
        if self._exclusive or self._holder is not None:
            return None
        best, least = None, (0, 0)
        for process in self.processes:
            load = process.in_flight, process.given
            if process.free and (best is None or load < least):
                best, least = process, load
        if best is None:
            return None
        best.given += 1
        return best.free.pop()


def _free(slot: Slot) -> None:
    """Note that a slot has no call; one whose answer was not read is taken last, as it may have to wait for it."""
    slot.lease = None
    if slot.process.is_over:
        slot.close()
    slot.process.free.insert(0 if slot.is_open else len(slot.process.free), slot)
