"""Executable pools: one executable on each GPU; a call goes to the one with the fewest calls in flight."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from nimblert.calls import refitting
from nimblert.calls.changing import Change, Commit, uninterrupted
from nimblert.calls.refitting import NewWeights
from nimblert.calls.state import T
from nimblert.calls.turn import Guard
from nimblert.context import Context, while_idle
from nimblert.errors import DeviceMismatchError, InputError
from nimblert.executable import Executable, load
from nimblert.files import container
from nimblert.interpreter import copied
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.plan import Plan, Target
from nimblert.pool import Pool, ordinals

if TYPE_CHECKING:
    from nimblert.processes import ProcessPool


@dataclass(slots=True, eq=False)
class _Member:
    """An executable, and the number of its calls so far."""

    executable: Executable
    given: int = 0

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The live contexts of the executable."""
        return copied(self.executable._contexts)  # noqa: SLF001 - of the same package


class _Call(Guard):
    """A call, which is in flight as long as its thread has the lock, whatever exception ends it."""

    __slots__ = ("member",)

    def __init__(self, member: _Member) -> None:
        super().__init__("pool")
        self.member = member


class ExecutablePool(Pool):
    """A plan on several devices, in this process. Threads and tasks may share it.

    A kernel that fails ends the use of CUDA in this process: every later call, on any GPU, raises CudaError. With
    ``load_pool(..., processes=True)`` GPUs fail independently.
    """

    def __init__(self, executables: Sequence[Executable]) -> None:
        """``executables`` are of one plan, and closed with the pool; see `load_pool`."""
        super().__init__(executables[0].plan)
        self._members = [_Member(executable) for executable in executables]
        families = [executable._turn.family for executable in executables]  # noqa: SLF001 - of the same package
        for executable in executables:  # a refit waits for the calls of all
            executable._turn.family = lambda: [guard for family in families for guard in family()]  # noqa: SLF001
        self._calls: list[_Call] = []
        """Those in flight, and perhaps some that an exception of a signal handler has ended."""
        self._closed = False
        self._exclusive = threading.Lock()
        """Taken within the guard by who has the pool for itself, or waits for that."""
        self._guard = Guard("pool")

    def __repr__(self) -> str:
        return f"ExecutablePool({self._members[0].executable!r}, devices={list(self.devices)})"

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that calls go to."""
        return tuple(member.executable.device for member in self._members)

    def __call__(
        self, /, *args: Any, entry: str | None = None, **kwargs: Any
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """As a call of an executable, on the device with the fewest calls in flight."""
        return self._call(lambda executable: executable(*args, entry=entry, **kwargs))

    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """As `Context.run`, on the device with the fewest calls in flight.

        Raises InputError, CudaError.
        """
        return self._call(lambda executable: executable.run(arrays, entry=entry, out=out))

    def empty_input(self, name: str, *, entry: str | None = None) -> np.ndarray:
        """As `Context.empty_input`, for a call on any of the devices."""
        self._check_open()
        return self._members[0].executable.empty_input(name, entry=entry)

    def context(self) -> Context:
        """A new context, with a state of its own, on the device with the fewest calls in flight and contexts.

        `Context.close` frees it, as does closing the pool.
        """
        return self._do(lambda member, calls: calls + len(member.contexts), lambda member: member.executable.context())

    def refit(self, weights: NewWeights) -> None:
        """Replace weights on all devices, as `Executable.refit` does on one.

        Calls in flight end before the change, and others begin after it. The arrays are on the host. No device
        changes before all are prepared; where one cannot be, none changes. Raises InputError, CudaError.
        """
        self._alone(partial(self._refit, weights))

    def _refit(self, weights: NewWeights) -> None:
        refits = [
            partial(one._refit, refitting.checked(self.plan, weights, one._working.take))  # noqa: SLF001
            for one in (member.executable for member in self._members)
        ]
        _refit_all(refits, ())

    def reset(self) -> None:
        """Give the state of every context its initial values, those of the plan.

        Runs of contexts end before, or begin after it. Raises InputError, and resets none, where a run by steps is half
        done.
        """
        self._alone(self._reset)

    def _reset(self) -> None:
        contexts = [context for member in self._members for context in (member.executable, *member.contexts)]

        def change() -> None:
            for context in contexts:
                if not context._turn.closed:  # noqa: SLF001 - of the same package
                    context._working.kept.reset()  # noqa: SLF001

        while_idle(contexts, lambda _: uninterrupted(change))

    def close(self) -> None:
        """Free every device once the calls in flight have ended; calling it twice is harmless.

        Does nothing in a forked process. Raises InputError within a call: in a signal handler or a finalizer that has
        interrupted it.
        """
        if os.getpid() != self._process:
            return
        self._check_not_within()
        self._closed = True
        with self._guard.owner, self._guard.lock, self._exclusive:
            self._wait_for_calls()
            with ExitStack() as stack:  # all of them, whatever one raises
                for member in self._members:
                    stack.callback(member.executable.close)

    def _call(self, use: Callable[[Executable], T]) -> T:
        """What ``use`` returns of the idlest executable."""
        if self._keeps:
            raise InputError("the plan has state, which is each device's own: call a context of yours, pool.context()")

        def counted(member: _Member) -> T:
            member.given += 1
            return use(member.executable)

        return self._do(lambda member, calls: (calls, member.given), counted)

    def _do(self, order: Callable[[_Member, int], Any], use: Callable[[_Member], T]) -> T:
        """What ``use`` returns for the first member by ``order``; that counts as a call in flight.

        ``order`` takes a member and the number of its calls in flight.
        """
        self._check_process()
        while True:
            others = _in_flight(self._calls)
            busy = [call.member for call in others]
            call = _Call(min(self._members, key=lambda member: order(member, busy.count(member))))
            with call.owner, call.lock:
                self._calls.append(call)  # before the look at others, who take the lock before they look at the calls
                try:
                    self._check_open()
                    if not self._exclusive.locked() or any(other.is_within for other in others):
                        return use(call.member)
                finally:
                    self._calls.remove(call)
            self._check_not_within()
            with self._guard.owner, self._guard.lock:  # once who has the pool for itself is done
                pass

    def _alone(self, change: Callable[[], object]) -> None:
        """Wait for the calls in flight, and change something before others begin."""
        self._check_process()
        self._check_not_within()
        with self._guard.owner, self._guard.lock, self._exclusive:
            self._check_open()
            self._wait_for_calls()
            change()

    def _wait_for_calls(self) -> None:
        for call in _in_flight(self._calls):
            with call.lock:
                pass

    def _check_not_within(self) -> None:
        """Raise InputError where this thread is in a call, a refit or a reset of the pool, or works for a call."""
        for guard in (self._guard, *_in_flight(self._calls)):
            guard.check_not_within()
        self._members[0].executable.check_not_within()  # nor in one of another member

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this pool is closed: load the plan again")


def _refit_all(refits: Sequence[Callable[[Commit], None]], changes: tuple[Change, ...]) -> None:
    """Do these refits, and make ``changes``, those of others, once all are prepared."""
    if refits:
        first, *others = refits
        first(lambda change: _refit_all(others, (*changes, change)))
    else:
        uninterrupted(lambda: [change() for change in changes])


def _in_flight(calls: list[_Call]) -> list[_Call]:
    """Those whose threads are at work; others are removed."""
    found = [*calls]
    for call in found:
        if not call.lock.locked():
            with suppress(ValueError):  # another thread has removed it
                calls.remove(call)
    return [call for call in found if call.lock.locked()]


@overload
def load_pool(
    plan: Plan | container.Source,
    *,
    devices: Sequence[int] | None = None,
    processes: Literal[False] = False,
    program: str | None = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> ExecutablePool: ...


@overload
def load_pool(
    plan: Plan | container.Source,
    *,
    devices: Sequence[int] | None = None,
    processes: Literal[True],
    contexts: int = 8,
    program: str | None = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> "ProcessPool": ...


def load_pool(
    plan: Plan | container.Source,
    *,
    devices: Sequence[int] | None = None,
    processes: bool = False,
    contexts: int = 8,
    program: str | None = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> "ExecutablePool | ProcessPool":
    """Load a plan on several GPUs: those with the ordinals ``devices``, or all of this machine that can run it.

    - ``processes``: load it in a process for each GPU, whose interpreter runs the calls, so that GPUs fail
      independently; a GPU that is named twice has two. Inputs and outputs are then on the host, and the plan has no
      state.
    - ``contexts``: with ``processes``, the number of calls that run at the same time on each GPU.

    The other arguments are those of `load`. A plan for the CPU, which uses all cores by itself, is loaded once.
    Raises what `load` raises if one of the given ``devices`` cannot run the plan, or no device at all can;
    DeviceLostError where a process ends meanwhile.
    """
    if devices is not None:
        devices = _checked(devices, may_repeat=processes)
    if processes:
        if not hasattr(os, "memfd_create"):
            raise InputError("processes: a pool of processes needs Linux: load it without processes=True")
        from nimblert.processes import loading  # which other programs need not import

        return loading.load(
            plan, devices, contexts=contexts, program=program, poison=poison, copy=copy, warm=warm, limits=limits
        )
    make = partial(load, program=program, poison=poison, copy=copy, warm=warm, limits=limits)
    mismatch: DeviceMismatchError | None = None
    with ExitStack() as loaded:
        found = []
        for device in ordinals(devices):
            try:
                found.append(loaded.enter_context(make(plan, device=device)))
            except DeviceMismatchError as exc:
                if devices is not None:
                    raise
                mismatch = mismatch or exc
            if found and found[0].plan.target is Target.CPU:
                break
        if not found:
            assert mismatch is not None
            raise mismatch
        loaded.pop_all()
    return ExecutablePool(found)


def _checked(devices: Sequence[int], *, may_repeat: bool) -> list[int]:
    try:
        given = [index(device) for device in devices]
    except TypeError:
        given = []
    if not given or (len(set(given)) < len(given) and not may_repeat):
        raise InputError(f"devices: got {devices!r}, expected ordinals of GPUs{'' if may_repeat else ', each once'}")
    return given
