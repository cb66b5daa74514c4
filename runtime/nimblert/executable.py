"""Executable: a loaded plan, with its code and weights on one device; and `load`, which makes one."""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from operator import call
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.arena import Arena
from nimblert.calls import refitting
from nimblert.calls.backend import Backend, Resident
from nimblert.calls.entries import Signature
from nimblert.calls.turn import Guard
from nimblert.context import Arrays, Context, while_idle
from nimblert.cpu.onnx_threads import Threads, cores
from nimblert.errors import DeviceMismatchError, InputError, NimbleError, PlanInvalidError
from nimblert.files import container
from nimblert.interpreter import copied
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.ordering.hazards import hazards
from nimblert.plan import Device, Plan, Target, Tensor
from nimblert.rules import verify

if TYPE_CHECKING:
    from nimblert.cuda import driver


class Executable(Context):
    """A loaded plan: a context, and the weights and code that further contexts share.

    Threads may share it. On a CPU with several cores, up to two calls per core run concurrently if the plan has no
    state; other calls take turns, and callers that want concurrency use a `context` each. A process that was forked
    after the load has to load again: threads and the GPU stay with the process that loaded.
    """

    _noun = "executable"
    _waits = True
    _again = "load the plan again"

    def __init__(
        self,
        plan: Plan,
        *,
        device: int = 0,
        arena: Arena | None = None,
        threads: Threads | None = None,
        poison: bool = False,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """``plan`` must be valid; see `load`, which checks it and documents the arguments."""
        self.device = device
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._idle_spares: list[Context] = []
        self._has_spares = plan.target is Target.CPU and not plan.state_nbytes and arena is None
        self._spares_left = 2 * cores() - 1 if cores() > 1 else 0  # with two per core, no core idles between calls
        self._making_spares = Guard(self._noun)
        _check_arena(arena, plan, device)
        resident = _resident(plan, device, threads, limits)
        self._given_back = ExitStack()
        self._given_back.callback(resident.close)
        try:
            super().__init__(plan, resident, arena=arena, poison=poison)
        except BaseException:
            resident.close()
            raise
        self._turn.family = self._making_spares.family = partial(_guards, weakref.ref(self))

    def context(self, *, arena: Arena | None = None) -> Context:
        """Another context over the same weights and code, with an arena, state, inputs and outputs of its own.

        With ``arena`` it uses that one, which other contexts may share. `Context.close` frees it, as does closing this
        executable. Raises InputError where this executable is closed, or the arena is too small or on another device.
        """
        _check_arena(arena, self.plan, self.device)
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready(self._turn.steps)
            made = Context(self.plan, self._resident, arena=arena, poison=self._poison)
            made._turn.family = self._turn.family  # noqa: SLF001 - of its own class
            self._contexts.add(made)
            return made

    def _run_any(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool, stream: Any
    ) -> dict[str, np.ndarray]:
        """As `Context._run_any`; a call during another one may run in a spare context instead."""
        if self._turn.lock.locked() and self._has_spares:
            here = reuse_outputs or stream is not None or self._bindings[signature.name].program is not None
            spare = None if here else self._spare()
        else:
            spare = None
        if spare is not None:
            try:
                return spare._run(signature, arrays, out, is_observed=True)  # noqa: SLF001 - of its own class
            except DeviceMismatchError:  # no memory for a program that it has not loaded
                pass
            finally:
                self._idle_spares.append(spare)
        return super()._run_any(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)

    def _spare(self) -> Context | None:
        """An idle spare context, or a new one while fewer than the most exist and memory is left; else None."""
        try:
            return self._idle_spares.pop()
        except IndexError:
            if not self._spares_left:
                return None
        self._turn.check_process()
        with self._making_spares.taken(), self._making_spares.lock:
            if not self._spares_left:
                return None
            try:
                made = _Spare(self.plan, self._resident, poison=self._poison)
            except DeviceMismatchError:
                return None
            made._turn.family = self._turn.family  # noqa: SLF001 - of its own class
            self._contexts.add(made)
            self._spares_left -= 1
            return made

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that `refit` replaces, by name, each with shape and dtype as the model has them."""
        return refitting.replaceable(self.plan)

    def refit(self, weights: refitting.NewWeights) -> None:
        """Replace weights: ``{name: array}``, or the path of a safetensors file; all of them, or none where it raises.

        Later runs compute what a plan compiled with these weights would, as fast as before. The arrays are copied; a
        file is mapped into memory meanwhile, and must not be truncated.
        Runs of other threads and contexts end before the change, or begin after it; an exception of a signal handler is
        raised before it or after it. ``plan`` is not changed.
        `weights` lists the replaceable ones: without ``--refittable``, those that the plan holds as the model has
        them. Weights that were folded into one constant must be given together. Raises InputError.
        """
        self._refit(refitting.checked(self.plan, weights, self._working.take))

    def _refit(self, refits: Sequence[refitting.Refit]) -> None:
        """Do checked refits, while no run is in progress."""
        with self._turn.taken(), self._turn.lock:
            self._turn.check_ready()

        def renew(own: list[dict[str, Backend]]) -> set[Backend]:
            return while_idle(copied(self._contexts), lambda others: self._renew(refits, [*own, *others]))

        with self._making_spares.taken(), self._making_spares.lock:
            unused = while_idle([self], renew)
        for backend in unused:
            backend.close()

    def _renew(self, refits: Sequence[refitting.Refit], loaded: Sequence[dict[str, Backend]]) -> set[Backend]:
        """Do refits for these backends, and return those that are then used no more."""
        old = [backend for backends in loaded for backend in backends.values()]

        def replace_old(renewed: Sequence[Backend]) -> None:
            successors = iter(renewed)
            for backends in loaded:
                backends.update({name: next(successors) for name in backends})

        self._resident.refit(refits, old, replace_old)
        return set(old) - {backend for backends in loaded for backend in backends.values()}

    def close(self) -> None:
        """Free everything, the contexts made of it too; calling it twice is harmless.

        Waits for the runs of other threads. Does nothing in a forked process, and while the interpreter shuts down.
        Raises InputError, and closes nothing, within a run: in a signal handler or a finalizer that has interrupted it.
        """
        if not self._turn.can_end:
            return
        for guard in self._turn.family():
            guard.check_not_within()
        with self._making_spares.taken(), self._making_spares.lock:
            self._spares_left = 0
        try:
            super().close()  # from here on no context is made
        finally:
            if self._turn.closed:  # else an exception of a signal handler came while a run ended
                self._close_contexts()

    def _close_contexts(self) -> None:
        """Close the contexts, whatever one raises, and then give back what they share."""
        contexts = copied(self._contexts)
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.callback(context.close)
        finally:
            if all(context._turn.closed for context in contexts):  # noqa: SLF001 - of its own class
                self._given_back.close()

    def hold(self, timeout_s: float) -> None:
        """As `Context.hold`; no more spare contexts are made either."""
        end_at = time.monotonic() + timeout_s
        if self._turn.can_end:
            self._making_spares.owner.acquire(timeout=timeout_s)
            self._spares_left = 0
        super().hold(max(0.0, end_at - time.monotonic()))


class _Spare(Context):
    """A context for concurrent calls of an executable."""

    _noun, _waits, _again = Executable._noun, Executable._waits, Executable._again  # noqa: SLF001 - users see an executable


def _guards(executable: "weakref.ref[Executable]") -> Sequence[Guard]:
    """Those of an executable and its contexts."""
    owner = executable()
    if owner is None:
        return ()
    turns = [context._turn for context in (owner, *copied(owner._contexts))]  # noqa: SLF001 - of one module
    return [owner._making_spares, *turns]  # noqa: SLF001


def _select(plan: Plan, name: str | None) -> Plan:
    """The plan with the program called ``name`` alone, or as it is."""
    if name is None:
        return plan
    for program in plan.programs:
        if program.name == name:
            return replace(plan, programs=(program,))
    raise InputError(f"program {name!r}: not found, the plan has {[p.name for p in plan.programs]}")


def load(
    plan: Plan | container.Source,
    *,
    program: str | None = None,
    device: int = 0,
    arena: Arena | None = None,
    threads: Threads | None = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Executable:
    """Load a plan on this machine: a `Plan`, the path of a plan file, or the bytes of one.

    The file is mapped, and a CPU plan uses its weights from there: it may be replaced while the executable lives, but
    not overwritten in place or truncated.

    - ``program``: the name of the only one to load, where the others will not be called.
    - ``device``: the ordinal of the GPU.
    - ``arena``: scratch memory that plans share which run one after the other.
    - ``threads``: the number of threads that a CPU plan computes with, the caller's included. By default one for each
      core that the process may use, and the caller's alone while as many runs as cores are at work. A list of
      processors also pins the threads; the first is the caller's, which is not moved.
    - ``poison``: fill memory that nothing should read with 0xFF bytes.
    - ``copy``: read the file into memory first, so that later changes to it do not matter.
    - ``warm``: load every program now, instead of each on its first call (`Context.warm`).
    - ``limits``: what the plan may ask of this machine; one beyond them is refused before anything is allocated
      for it.

    Raises PlanError for a file that cannot be read or a plan that is damaged, contradicts itself or is beyond
    ``limits``; DeviceMismatchError where this machine cannot run it; CudaError where a call of CUDA fails, as for lack
    of memory; and InputError for an invalid argument.
    """
    make = partial(_loaded, device=device, arena=arena, threads=threads, poison=poison, warm=warm, limits=limits)
    if isinstance(plan, Plan):
        return make(checked(plan, program, limits))
    image, path = container.open_image(plan, copy=copy), container.name(plan)
    decoded = container.decoded(image, path)
    if decoded.target is Target.CPU:
        container.verify_digest(image, path)
        return make(checked(decoded, program, limits))
    from concurrent.futures import ThreadPoolExecutor  # only a plan for a GPU needs it

    with ThreadPoolExecutor(3) as pool, ExitStack() as started:
        # Starting the GPU takes longer than all checks, which begin here; no code is loaded before both are done.
        # A future in a variable would form a cycle with its error, and keep a refused file mapped.
        tasks = partial(container.verify_digest, image, path), partial(checked, decoded, program, limits)
        checks: Iterator[Any]
        try:
            checks = pool.map(call, tasks)
            pool.submit(import_module, "nimblert.cuda.backend")  # `_resident` needs it next
        except RuntimeError:  # no thread can be started, or the main thread has ended
            checks = (task() for task in tasks)
        try:
            started.enter_context(closing(_start_device(decoded.device, device)))
        except NimbleError:
            tuple(checks)  # a fault of the plan is reported before one of the machine
            raise
        _, selected = checks
        return make(selected)


def checked(plan: Plan, program: str | None, limits: Limits) -> Plan:
    """The plan with the program to load, or all. Raises PlanInvalidError unless it is valid, InputError."""
    if not isinstance(limits, Limits):
        raise InputError(f"limits: got {type(limits).__name__}, expected a nimblert.Limits")
    verify.check(plan, limits)
    selected = _select(plan, program)
    for loaded in (*selected.programs, *selected.refits):
        if unordered := tuple(hazards(loaded, limits, target=plan.target)):
            raise PlanInvalidError(unordered)
    return selected


def _check_arena(arena: Arena | None, plan: Plan, device: int) -> None:
    if arena is None:
        return
    if not isinstance(arena, Arena):
        raise InputError(f"arena: got {type(arena).__name__}, expected a nimblert.Arena")
    arena.check(plan, device)


def _start_device(needed: Device, ordinal: int) -> "driver.Context":
    """Start the GPU; the context keeps it running. Raises DeviceMismatchError unless plans for ``needed`` run there."""
    from nimblert.cuda import driver  # each target imports only what it runs on

    driver.initialise()
    driver.check_device(needed, driver.describe(ordinal))
    return driver.Context(ordinal)


def _loaded(
    plan: Plan,
    *,
    device: int,
    arena: Arena | None,
    threads: Threads | None,
    poison: bool,
    warm: bool,
    limits: Limits,
) -> Executable:
    executable = Executable(plan, device=device, arena=arena, threads=threads, poison=poison, limits=limits)
    if warm:
        try:
            executable.warm()
        except BaseException:
            executable.close()
            raise
    return executable


def _resident(plan: Plan, device: int, threads: Threads | None, limits: Limits) -> Resident:
    """Code and weights of a plan on its target."""
    if plan.target is Target.CPU:
        from nimblert.cpu.backend import CpuResident

        if device:
            raise InputError(f"device {device}: a plan for the CPU has no devices to choose from: leave it out")
        return CpuResident(plan, threads=threads, limits=limits)
    if threads is not None:
        raise InputError("threads: a plan for a GPU computes with none of the CPU's: leave it out")
    from nimblert.cuda.backend import CudaResident

    return CudaResident(plan, device)
