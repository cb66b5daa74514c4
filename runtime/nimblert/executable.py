"""Executable: a loaded plan, with its code and weights on one device; and a pool of them."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.arena import Arena
from nimblert.calls.backend import Loaded
from nimblert.calls.entries import Signature
from nimblert.context import Arrays, Context
from nimblert.errors import DeviceMismatchError, InputError
from nimblert.plan import Plan, Target, Tensor
from nimblert.plan.records import DEFAULT_LIMITS, Limits
from nimblert.stages import stage

if TYPE_CHECKING:
    from nimblert.calls.refitting import NewWeights, Refit
    from nimblert.cpu.streams import Threads


class Executable(Context):
    """A loaded plan: a context, and the weights and code that further contexts share.

    Threads may share it. On a CPU with several cores, up to two calls per core run concurrently if the plan has no
    state; other calls take turns, and callers that want concurrency use a `context` each. After a fork,
    the child has to load again: threads and the GPU stay with the parent.
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
        threads: "Threads | None" = None,
        poison: bool = False,
        limits: Limits = DEFAULT_LIMITS,
        verify_digest: Callable[[], object] = bool,
    ) -> None:
        """Load a valid ``plan``; see `load`, which checks it and documents the arguments.

        ``verify_digest`` is called before any code is loaded, and raises PlanError where the file was altered.
        """
        _check_arena(arena, plan, device)
        self.device = device
        self.choice = ""
        """Which part of a fat plan this is, and why `load` took it; "" for a plan of its own."""
        self._poison = poison
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._idle: list[Context] = []
        self._idle_left = 0
        if plan.target is Target.CPU and not plan.state_nbytes and arena is None:
            from nimblert.cpu.streams import cores

            # With two calls per core, no core idles.
            self._idle_left = 2 * cores() - 1 if cores() > 1 else 0
        with stage("weights and code"):
            loaded = _loaded(plan, device, threads, limits, verify_digest)
        try:
            super().__init__(plan, loaded, arena=arena, poison=poison)
        except BaseException:
            loaded.close()
            raise

    def context(self, *, arena: Arena | None = None) -> Context:
        """Return another context over the same weights and code, with an arena, state, inputs and outputs of its own.

        With ``arena`` it uses that one, which other contexts may share. `Context.close` frees it, as does closing this
        executable. Raises InputError where this executable is closed, or the arena is too small or on another device.
        """
        _check_arena(arena, self.plan, self.device)
        self._lock.check_open()
        made = Context(self.plan, self._loaded, arena=arena, poison=self._poison)
        self._contexts.add(made)
        return made

    def _compute(
        self, signature: Signature, arrays: Arrays, out: Arrays, *, reuse_outputs: bool, stream: Any
    ) -> dict[str, np.ndarray]:
        """Run in this context, or in an idle one during another thread's call."""
        may_be_elsewhere = self._lock.is_busy and not reuse_outputs and self._bindings[signature.name].program is None
        context = self._idle_context() if may_be_elsewhere else None
        if context is None:
            return super()._compute(signature, arrays, out, reuse_outputs=reuse_outputs, stream=stream)
        try:
            return context._compute(signature, arrays, out, reuse_outputs=False, stream=stream)  # noqa: SLF001 - of its own class
        finally:
            if context._lock.closed is None:  # noqa: SLF001
                self._idle.append(context)

    def _idle_context(self) -> Context | None:
        """Return a context for a concurrent call; None where there are none, and no more are made."""
        try:
            return self._idle.pop()
        except IndexError:
            if not self._idle_left:
                return None
        self._idle_left -= 1  # two threads at a time may make one more than that
        try:
            return self.context()
        except DeviceMismatchError:  # no memory for it
            self._idle_left = 0
            return None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that `refit` replaces, by name, each with shape and dtype as the model has them."""
        from nimblert.calls import refitting

        return refitting.replaceable(self.plan)

    def refit(self, weights: "NewWeights") -> None:
        """Replace weights: ``{name: array}``, or the path of a safetensors file; all of them, or none where it raises.

        Later runs compute what a plan compiled with these weights would, as fast as before. The arrays are copied; a
        file is mapped into memory meanwhile, and must not be truncated.
        Runs of other threads and contexts end before the change, or begin after it. ``plan`` is not changed.
        `weights` lists the replaceable ones: without ``--refittable``, those that the plan holds as the model has
        them. Weights that were folded into one constant must be given together. Raises InputError.
        """
        from nimblert.calls import refitting

        self._refit(refitting.checked(self.plan, weights, self._working.take))

    def _refit(self, refits: "Sequence[Refit]") -> None:
        contexts = [self, *(context for context in self._contexts if context._lock.closed is None)]  # noqa: SLF001
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context._lock.waiting())  # noqa: SLF001 - of its own class
                context._check_idle()  # noqa: SLF001
            old = [(context, name, made) for context in contexts for name, made in context._backends.items()]  # noqa: SLF001
            renewed = self._loaded.refit(refits, [made for _, _, made in old])
            for (context, name, former), made in zip(old, renewed, strict=True):
                if made is not former:
                    context._backends[name] = made  # noqa: SLF001
                    context._forget()  # noqa: SLF001
                    former.close()

    def close(self) -> None:
        """Free everything, the contexts made of it too; calling it twice is harmless.

        Waits for the runs of other threads. Does nothing after a fork. Raises InputError within a call.
        """
        self._idle_left = 0
        # The stack closes each of them, whatever another raises.
        with ExitStack() as stack:
            if self._lock.close():
                stack.callback(self._loaded.close)
                stack.callback(self._free)
            for context in list(self._contexts):
                stack.callback(context.close)


def _check_arena(arena: Arena | None, plan: Plan, device: int) -> None:
    if arena is None:
        return
    if not isinstance(arena, Arena):
        raise InputError(f"arena: got {type(arena).__name__}, expected a nimblert.Arena")
    arena.check(plan, device)


def _loaded(
    plan: Plan, device: int, threads: "Threads | None", limits: Limits, verify_digest: Callable[[], object]
) -> Loaded:
    """Load code and weights of a plan on its target."""
    if plan.target is Target.CPU:
        from nimblert.cpu.backend import CpuLoaded

        if device:
            raise InputError(f"device {device}: a plan for the CPU has no devices to choose from: leave it out")
        return CpuLoaded(plan, threads=threads, limits=limits)
    if threads is not None:
        raise InputError("threads: a plan for a GPU computes with none of the CPU's: leave it out")
    from nimblert.cuda.backend import CudaLoaded

    return CudaLoaded(plan, device, verify_digest)


class ExecutablePool(AbstractContextManager["ExecutablePool"]):
    """A plan without state on several devices; see `load_pool`. Threads and tasks may share it.

    A call goes to the device with the fewest calls in flight. No error of a call takes a device out of service.
    """

    def __init__(self, executables: Sequence[Executable]) -> None:
        first, *_ = self.executables = tuple(executables)
        from nimblert.check.program_rules import keeps_state

        if keeps_state(first.plan):
            raise InputError("the plan has state, and a pool's calls run on any device: load it on each, with load()")
        self.plan, self.entries, self.weights = first.plan, first.entries, first.weights
        self.devices = tuple(executable.device for executable in self.executables)
        self._in_flight: list[Executable] = []
        """The executable of each call in flight. Lists count, append and remove atomically: no lock is needed."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """As `Context.inputs`."""
        return self.executables[0].inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """As `Context.outputs`."""
        return self.executables[0].outputs

    def __call__(self, /, *args: Any, entry: str | None = None, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Call one of the executables, as `Context.__call__` does. Raises InputError, CudaError."""
        with self._least_busy() as executable:
            return executable(*args, entry=entry, **kwargs)

    def run(
        self, arrays: Mapping[str, Any], *, entry: str | None = None, out: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Run an entry on one of the devices, as `Context.run` does. Raises InputError, CudaError."""
        with self._least_busy() as executable:
            return executable.run(arrays, entry=entry, out=out)

    async def arun(self, arrays: Mapping[str, Any], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """Run an entry without blocking the event loop; a run is completed even if its task is cancelled."""
        import asyncio  # the caller's event loop has imported it

        return await asyncio.to_thread(self.run, arrays, entry=entry)

    @contextmanager
    def _least_busy(self) -> Iterator[Executable]:
        executable = min(self.executables, key=self._in_flight.count)
        self._in_flight.append(executable)
        try:
            yield executable
        finally:
            self._in_flight.remove(executable)

    def refit(self, weights: "NewWeights") -> None:
        """Replace weights on one device after the other, as `Executable.refit` does.

        Raises InputError, and changes no device, where an array does not fit. Raises CudaError where a device has too
        little memory; the devices before it then have the new weights.
        """
        from nimblert.calls import refitting

        checked = [refitting.checked(one.plan, weights, one._working.take) for one in self.executables]  # noqa: SLF001 - of the same package
        for executable, refits in zip(self.executables, checked, strict=True):
            executable._refit(refits)  # noqa: SLF001

    def close(self) -> None:
        """Close every executable, whatever one raises; calling it twice is harmless."""
        with ExitStack() as stack:
            for executable in self.executables:
                stack.callback(executable.close)

    def __exit__(self, *_: object) -> None:
        self.close()
