"""Turns: runs in one context take place one after the other."""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from nimblert.arrays import dlpack
from nimblert.errors import InputError
from nimblert.plan import Program, Work

DirectCall: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""Takes arrays by input name; returns None, having done nothing, where the call is not the usual one."""

Relaunch: TypeAlias = Callable[[Any], bool]
"""Takes a stream of the caller, or None for our own; returns False, having done nothing, where it cannot launch."""

Steps: TypeAlias = Generator[Work, None, None]


inner_threads: set[int] = set()
"""Threads that work for calls. A finalizer there may not wait for a call, which may wait for its thread."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=inner_threads.clear)  # whose numbers other threads have there


class Guard:
    """A lock that raises, instead of deadlocking, when its holder takes it again: ``with guard.taken(), guard.lock``.

    Where nobody has the ``lock``, ``with guard.owner, guard.lock`` will do. The two are of the interpreter itself, so
    that no exception of a signal handler comes between them and the block, which must not be in a generator: one that
    is dropped ends in any thread.
    """

    __slots__ = ("_noun", "family", "lock", "owner")

    def __init__(self, noun: str) -> None:
        self.owner = threading.RLock()
        self.lock = threading.Lock()
        self.family: Callable[[], Iterable[Guard]] = tuple
        """The guards that a thread which holds this one may wait for, as a refit does."""
        self._noun = noun

    @property
    def is_within(self) -> bool:
        """Whether this thread has the lock."""
        return self.lock.locked() and bool(self.owner._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001 - as Condition

    def check_not_within(self) -> None:
        """Raise InputError in the thread that has the lock, and in one that works for a call."""
        if self.is_within or threading.get_ident() in inner_threads:
            raise within(self._noun)

    def taken(self) -> threading.RLock:
        """The owner, to be had before the lock. Raises InputError where this thread may wait for itself."""
        self.check_not_within()
        if self.lock.locked() and any(other.is_within for other in self.family()):
            raise within(self._noun)
        return self.owner


class Turn(Guard):
    """The lock of a context, and what it guards.

    ``program`` is the program of the last run, ``parts`` the number of runs of the call that it was part of.
    ``steps`` is a run by steps that is half done. Direct calls and relaunches are good only while ``state`` is the
    same object. Where the lock is another thread's, callers wait if ``waits``, and are refused otherwise. ``noun`` and
    ``again`` are for messages: "executable", "load the plan again".
    """

    __slots__ = ("_again", "_holder", "closed", "parts", "process", "program", "state", "steps", "waits")

    def __init__(self, program: Program, noun: str, again: str, *, waits: bool) -> None:
        super().__init__(noun)
        self.process = os.getpid()
        self.program = program
        self.parts = 1
        self.state = object()
        self.steps: Steps | None = None
        self.closed = False
        self.waits = waits
        self._again = again
        self._holder: int | None = None

    def taken(self) -> threading.RLock:
        """As `Guard.taken`.

        Raises InputError also in a forked process, whose copy of the lock a thread of the parent may have held, and
        where the lock is another thread's and callers do not wait.
        """
        self.check_process()
        if self.lock.locked():
            if self._holder == threading.get_ident():
                raise InputError(f"this {self._noun} can no longer be used: the interpreter is shutting down")
            is_busy = not self.waits and not self.is_within
            if is_busy and self.lock.locked():  # still: a refit, for which callers wait, may have ended meanwhile
                busy = f"this {self._noun} is at work in another thread"
                raise InputError(f"{busy}: each takes one of its own, context()")
        return super().taken()

    def check_process(self) -> None:
        """Raise InputError in a forked process."""
        if os.getpid() != self.process:
            raise InputError(f"this {self._noun} was loaded in process {self.process}: load the plan again in this one")

    def check_ready(self, steps: Steps | None = None) -> None:
        """Raise InputError where the context is closed, or a run by other steps than these is half done."""
        if self.closed:
            raise InputError(f"this {self._noun} is closed: {self._again}")
        if self.steps is not steps:
            raise InputError("a run by steps() is half done: exhaust it or close it first")

    def hold(self, timeout_s: float) -> None:
        """Take the lock for ever, at the end of the interpreter: other threads wait, and this one is refused."""
        self._holder = threading.get_ident()
        self.waits = True
        if self.owner.acquire(timeout=timeout_s):
            self.lock.acquire(timeout=timeout_s)

    @property
    def can_end(self) -> bool:
        """Whether the context can be closed: not in a forked process, nor once the lock was taken by `hold`."""
        return os.getpid() == self.process and self._holder is None


def within(noun: str) -> InputError:
    """The error of what waits for a run, in the thread that makes it."""
    return InputError(
        f"this {noun} is at work in this thread, which a signal handler or a finalizer has interrupted: do this when "
        "the call has returned"
    )


def relaunch(turn: Turn, watches: Sequence[Callable[[], bool]], launch: Callable[[int | None], None]) -> Relaunch:
    """A function that launches the program of the last launch again, until something changes in the context.

    ``watches`` tell of each bound array whether it is where it was; they may raise `dlpack.REFUSALS`.
    """
    owner, lock, state, program, process = turn.owner, turn.lock, turn.state, turn.program, turn.process

    def again(stream: Any) -> bool:
        if lock.locked() or process != os.getpid():
            return False
        if not (stream is None or (type(stream) is int and stream >= 0)):
            return False
        with owner, lock:
            if not (turn.state is state and turn.program is program and turn.parts == 1):
                return False
            try:
                for is_there in watches:
                    if not is_there():
                        return False
            except dlpack.REFUSALS:
                return False
            launch(stream)
            return True

    return again
