"""Executable pools: one executable on each GPU; a call goes to the one with the fewest calls in flight."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import index
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from nimblert.calls import refitting
from nimblert.calls.refitting import NewWeights
from nimblert.calls.turn import within
from nimblert.context import Context
from nimblert.errors import DeviceMismatchError, InputError
from nimblert.executable import Executable, load
from nimblert.files import container
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.plan import Plan, Target
from nimblert.pool import Pool, ordinals

if TYPE_CHECKING:
    from nimblert.processes import ProcessPool


@dataclass(slots=True, eq=False)
class _Member:
    """An executable, the number of its calls in flight, and that of all its calls so far."""

    executable: Executable
    in_flight: int = 0
    given: int = 0

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The live contexts of the executable."""
        return tuple(self.executable._contexts)  # noqa: SLF001 - of the same package


class ExecutablePool(Pool):
    """A plan on several devices, in this process. Threads and tasks may share it.

    A kernel that fails ends the use of CUDA in this process: every later call, on any GPU, raises CudaError. With
    ``load_pool(..., processes=True)`` GPUs fail independently.
    """

    def __init__(self, executables: Sequence[Executable]) -> None:
        """``executables`` are of one plan, and closed with the pool; see `load_pool`."""
        super().__init__(executables[0].plan)
        self._members = [_Member(executable) for executable in executables]
        self._state = threading.Condition()
        self._calling: list[int] = []
        """The threads of the calls in flight."""
        self._closed = False
        self._exclusive: int | None = None
        """The thread that has the pool for itself, or waits for that."""

    def __repr__(self) -> str:
        return f"ExecutablePool({self._members[0].executable!r}, devices={list(self.devices)})"

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that calls go to."""
        return tuple(member.executable.device for member in self._members)

    def __call__(
        self, *args: Any, entry: str | None = None, **kwargs: Any
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """As a call of an executable, on the device with the fewest calls in flight."""
        with self._turn() as executable:
            return executable(*args, entry=entry, **kwargs)

    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """As `Context.run`, on the device with the fewest calls in flight.

        Raises InputError, CudaError.
        """
        with self._turn() as executable:
            return executable.run(arrays, entry=entry, out=out)

    def context(self) -> Context:
        """A new context, with a state of its own, on the device with the fewest calls in flight and contexts.

        `Context.close` frees it, as does closing the pool.
        """
        self._check_process()
        with self._state:
            self._wait_until_open()
            return min(self._members, key=lambda m: m.in_flight + len(m.contexts)).executable.context()

    def refit(self, weights: NewWeights) -> None:
        """Replace weights on all devices, as `Executable.refit` does on one.

        Calls in flight end before the change, and others begin after it. The arrays are on the host. No device
        changes before all are prepared; where one cannot be, none changes. Raises InputError, CudaError.
        """
        with self._alone():
            refits = [
                partial(one._refit, refitting.checked(self.plan, weights, one._working.take))  # noqa: SLF001
                for one in (member.executable for member in self._members)
            ]
            # Each prepares, has those before it prepare and change, then changes itself.
            reduce(lambda ready, refit: partial(refit, ready=ready), refits)()

    def reset(self) -> None:
        """Give the state of every context its initial values, those of the plan."""
        with self._alone():
            for member in self._members:
                for context in (member.executable, *member.contexts):
                    if not context._turn.closed:  # noqa: SLF001 - of the same package
                        context.reset()

    def close(self) -> None:
        """Free every device once the calls in flight have ended; calling it twice is harmless.

        Does nothing in a forked process. Raises InputError within a call: in a signal handler or a finalizer that has
        interrupted it.
        """
        if os.getpid() != self._process:
            return
        with self._state:
            self._check_not_within()
            self._closed = True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._calling)
        for member in self._members:
            member.executable.close()

    @contextmanager
    def _turn(self) -> Iterator[Executable]:
        """The executable for a call, which counts as in flight until the block ends."""
        if self._keeps:
            raise InputError("the plan has state, which is each device's own: call a context of yours, pool.context()")
        self._check_process()
        thread = get_ident()
        with self._state:
            self._wait_until_open()
            member = min(self._members, key=lambda m: (m.in_flight, m.given))
            member.in_flight += 1
            member.given += 1
            self._calling.append(thread)
        try:
            yield member.executable
        finally:
            with self._state:
                member.in_flight -= 1
                self._calling.remove(thread)
                self._state.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for the calls in flight, and let no more begin until the block ends."""
        self._check_process()
        with self._state:
            self._check_not_within()
            self._wait_until_open()
            self._exclusive = get_ident()
        try:
            with self._state:
                self._state.wait_for(lambda: not self._calling)
            yield
        finally:
            with self._state:
                self._exclusive = None
                self._state.notify_all()

    def _check_not_within(self) -> None:
        """Raise InputError where this thread is in a call, a refit or a reset of the pool, or works for a call."""
        if get_ident() in (*self._calling, self._exclusive):
            raise within("pool")
        for member in self._members:
            member.executable.check_not_within()

    def _wait_until_open(self) -> None:
        """Wait while a block of `_alone` runs. Raises InputError once the pool is closed."""
        self._state.wait_for(self._is_open)
        if self._closed:
            raise InputError("this pool is closed: load the plan again")

    def _is_open(self) -> bool:
        if self._exclusive is not None and not self._closed:
            self._check_not_within()
        return self._closed or self._exclusive is None


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
