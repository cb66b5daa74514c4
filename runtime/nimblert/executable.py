"""Executable: a loaded plan, with its code and weights on one device; a pool of them; `load` and `load_pool`."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from operator import call
from typing import TYPE_CHECKING, Any

import numpy as np

from nimblert.arena import Arena
from nimblert.calls.backend import Loaded
from nimblert.calls.entries import Signature
from nimblert.context import Arrays, Context
from nimblert.errors import DeviceMismatchError, InputError, NimbleError, PlanInvalidError
from nimblert.plan import Device, Plan, Target, Tensor
from nimblert.plan.records import DEFAULT_LIMITS, Limits, is_integer

if TYPE_CHECKING:
    from os import PathLike

    from nimblert.calls.refitting import NewWeights, Refit
    from nimblert.cpu.streams import Threads
    from nimblert.cuda import driver
    from nimblert.plan.container import Source
    from nimblert.plan.signatures import FileOrBytes, Trust


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
    ) -> None:
        """Load a valid ``plan``; see `load`, which checks it and documents the arguments."""
        _check_arena(arena, plan, device)
        self.device = device
        self.choice = ""
        """Which part of a fat plan this is, and why `load` took it; "" for a plan of its own."""
        self._poison = poison
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._idle: list[Context] = []
        self._idle_left = 0
        if plan.target is Target.CPU and not plan.state_nbytes and arena is None:
            self._idle_left = _spares()
        loaded = _loaded(plan, device, threads, limits)
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
        if self._lock.is_foreign:
            return
        self._idle_left = 0
        # The stack closes each of them, whatever another raises.
        with ExitStack() as stack:
            if self._lock.close():
                stack.callback(self._loaded.close)
                stack.callback(self._free)
            for context in list(self._contexts):
                stack.callback(context.close)


def _select(plan: Plan, name: str | None) -> Plan:
    """Return the plan with the program called ``name`` alone, or as it is."""
    if name is None:
        return plan
    for program in plan.programs:
        if program.name == name:
            return replace(plan, programs=(program,))
    raise InputError(f"program {name!r}: not found, the plan has {[p.name for p in plan.programs]}")


def load(
    plan: "Plan | Source",
    *,
    program: str | None = None,
    device: int = 0,
    arena: Arena | None = None,
    threads: "Threads | None" = None,
    poison: bool = False,
    copy: bool = False,
    warm: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    target: str | None = None,
    trusted_keys: "Sequence[FileOrBytes] | None" = None,
    signature: "FileOrBytes | None" = None,
    weights: "str | PathLike[str] | None" = None,
) -> Executable:
    """Load a plan on this machine: a `Plan`, the path of a plan file, or the bytes of one.

    The file is mapped, and a CPU plan uses its weights from there: it may be replaced while the executable lives, but
    not overwritten in place or truncated.

    - ``program``: the name of the only one to load, where the others will not be called.
    - ``device``: the ordinal of the GPU.
    - ``target``: "cuda" or "cpu". A fat plan (`nimblec merge`) is loaded from the first of its parts that runs on this
      machine, those for GPUs first; this forces one of a target, and another ``device`` than 0 one for that GPU.
      `Executable.choice` says which it is, and why.
    - ``arena``: scratch memory that plans share which run one after the other.
    - ``threads``: the number of threads that a CPU plan computes with, the caller's included. By default one for each
      core that the process may use. A list of processors also pins the threads; the first is the caller's, which is
      not moved.
    - ``poison``: fill memory that nothing should read with 0xFF bytes.
    - ``copy``: read the file into memory first, so that later changes to it do not matter.
    - ``warm``: load every program now, instead of each on its first call (`Context.warm`).
    - ``limits``: what the plan may ask of this machine; one beyond them is refused before anything is allocated
      for it.
    - ``trusted_keys``: public Ed25519 keys in OpenSSH or PEM form, by path or as bytes. Unless one of them has signed
      the file (`nimblec sign`), it is refused before anything of it is parsed. It is read into memory, as with
      ``copy``. ``signature`` is the signature's file or bytes, by default the file PLAN.sig.
    - ``weights``: for a plan of `nimblec compile --strip-weights`, the file that holds its weights. They are compared
      with the digests in the plan, and used like those in a plan.

    Raises PlanError for a file that cannot be read or a plan that is damaged, contradicts itself or is beyond
    ``limits``, and its subclass PlanSignatureError for a file that no trusted key has signed; DeviceMismatchError where
    this machine cannot run it; CudaError where a call of CUDA fails, as for lack of memory; and InputError for an
    invalid argument.
    """
    make = partial(_executable, device=device, arena=arena, threads=threads, poison=poison, warm=warm, limits=limits)
    if not isinstance(limits, Limits):
        raise InputError(f"limits: got {type(limits).__name__}, expected a nimblert.Limits")
    trust = _trust(trusted_keys, signature)
    if isinstance(plan, Plan) and plan.target is Target.FAT and trust is None:
        plan = plan.stored()
    if isinstance(plan, Plan):
        if trust is not None:
            raise InputError("trusted_keys: the plan is a Plan, which was parsed before: give its file, or its bytes")
        _check_target(plan, target)
        return make(checked(plan, program, limits, weights, copy=copy))
    from nimblert.plan import container

    image, path = container.open_image(plan, copy=copy, trust=trust), container.name(plan)
    decoded = container.decoded(image, path, limits)
    choice, shared = "", None
    if decoded.target is Target.FAT:
        from nimblert import fitting
        from nimblert.plan import parts

        shared = decoded
        index, choice = fitting.choose(shared, target, device)
        decoded = parts.read(shared, index, path, limits)
        image, path = shared.parts[index].file, parts.name(path, index)
    _check_target(decoded, target)
    make = partial(make, choice=choice)
    # With a signature, which covers the weights by their digests, later changes of their file must not matter either.
    check = partial(checked, weights=weights, copy=copy or trust is not None, shared=shared)
    if decoded.target is Target.CPU:
        container.verify_digest(image, path)
        return make(check(decoded, program, limits))
    # CPU plans load without this import.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool, ExitStack() as started:
        # Starting the GPU takes longer than all checks, which begin here; no code is loaded before both are done.
        # A future in a variable would form a cycle with its error, and keep a refused file mapped.
        tasks = partial(container.verify_digest, image, path), partial(check, decoded, program, limits)
        checks: Iterator[Any] = pool.map(call, tasks)
        pool.submit(import_module, "nimblert.cuda.backend")  # `_loaded` needs it next
        try:
            started.enter_context(closing(_start_device(decoded.device, device)))
        except NimbleError:
            tuple(checks)  # a fault of the plan is reported before one of the machine
            raise
        _, selected = checks
        return make(selected)


def _trust(trusted_keys: "Sequence[FileOrBytes] | None", signature: "FileOrBytes | None") -> "Trust | None":
    if trusted_keys is None and signature is None:
        return None
    from nimblert.plan.signatures import Trust

    return Trust(() if trusted_keys is None else trusted_keys, signature)


def checked(
    plan: Plan,
    program: str | None,
    limits: Limits,
    weights: "str | PathLike[str] | None" = None,
    *,
    copy: bool = False,
    shared: Plan | None = None,
) -> Plan:
    """Return the plan with the program to load, or all, and with its ``weights`` where it was stripped of them.

    ``shared`` is the fat plan that the plan is a part of.
    Raises PlanInvalidError unless it is valid, InputError.
    """
    from nimblert.check import hazards, verify

    if shared is not None:
        from nimblert.plan import parts

        plan = parts.filled(plan, shared)
    if plan.is_stripped or weights is not None:
        from nimblert.plan import external

        plan = external.filled(plan, weights, copy=copy)
    verify.check(plan, limits)
    selected = _select(plan, program)
    for loaded in (*selected.programs, *selected.refits):
        if unordered := tuple(hazards.hazards(loaded, limits, target=plan.target, bodies=plan.bodies)):
            raise PlanInvalidError(unordered)
    return selected


def _check_target(plan: Plan, target: str | None) -> None:
    if target is None:
        return
    from nimblert import fitting

    if fitting.is_excluded(plan.target, target):
        raise InputError(f"target: got {target!r}, and the plan is for {plan.target.name.lower()} alone")


def _spares() -> int:
    """Return how many contexts concurrent calls may use beside the executable: with two per core, no core idles."""
    from nimblert.cpu.streams import cores

    return 2 * cores() - 1 if cores() > 1 else 0


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


def _executable(
    plan: Plan,
    *,
    device: int,
    arena: Arena | None,
    threads: "Threads | None",
    poison: bool,
    warm: bool,
    limits: Limits,
    choice: str = "",
) -> Executable:
    executable = Executable(plan, device=device, arena=arena, threads=threads, poison=poison, limits=limits)
    executable.choice = choice
    if warm:
        try:
            executable.warm()
        except BaseException:
            executable.close()
            raise
    return executable


def _loaded(plan: Plan, device: int, threads: "Threads | None", limits: Limits) -> Loaded:
    """Load code and weights of a plan on its target."""
    if plan.target is Target.CPU:
        from nimblert.cpu.backend import CpuLoaded

        if device:
            raise InputError(f"device {device}: a plan for the CPU has no devices to choose from: leave it out")
        return CpuLoaded(plan, threads=threads, limits=limits)
    if threads is not None:
        raise InputError("threads: a plan for a GPU computes with none of the CPU's: leave it out")
    from nimblert.cuda.backend import CudaLoaded

    return CudaLoaded(plan, device)


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


def load_pool(plan: "Plan | Source", *, devices: Sequence[int] | None = None, **options: Any) -> ExecutablePool:
    """Load a plan on the GPUs with the ordinals ``devices``, or on all that can run it; `load` has the ``options``.

    A plan for the CPU, which uses all cores by itself, is loaded once. Raises InputError for a plan with state, and
    what `load` raises where one of the given devices, or no device at all, can run the plan.
    """
    if not (devices is None or (isinstance(devices, Sequence) and devices and all(map(is_integer, devices)))):
        raise InputError(f"devices: got {devices!r}, expected ordinals of GPUs")
    with ExitStack() as loaded:
        found: list[Executable] = []
        for device in _ordinals() if devices is None else devices:
            try:
                found.append(loaded.enter_context(load(plan, device=int(device), **options)))
                if found[0].plan.target is Target.CUDA:
                    options["target"] = "cuda"  # a fat plan's part for the CPU stands beside no GPU
            except DeviceMismatchError:
                if devices is not None:
                    raise
            if found and found[0].plan.target is Target.CPU:
                break
        # Where no device can run the plan, this load raises the error of the first one.
        pool = ExecutablePool(found or [load(plan, **options)])
        loaded.pop_all()
    return pool


def _ordinals() -> Iterator[int]:
    """Yield the ordinals of all GPUs: the first one before CUDA starts, which a plan for the CPU does without."""
    yield 0
    from nimblert.cuda import driver

    driver.initialise()
    yield from range(1, driver.count())
