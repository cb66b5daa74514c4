"""Executable: a loaded plan that can be called; the one stateful object of the runtime."""

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from nimblert import container, verify
from nimblert.entries import Signature
from nimblert.errors import InputError, PlanInvalidError
from nimblert.extents import region_sizes
from nimblert.hazards import hazards
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.plan import Plan, Pointer, Program, Target, Tensor, Work

if TYPE_CHECKING:
    from nimblert.driver import Context

_LAST_RUN_S = 10.0
"""How long the end of the interpreter waits for a run of a daemon thread."""


_LISTED = 4
"""Of what may be many, a repr shows so many."""


class Backend(Protocol):
    """A program in memory. `inputs` and `outputs` are strided views of host memory."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]

    def run(self) -> None:
        """Compute the outputs of the inputs."""

    def replay(self) -> None:
        """Compute again on the inputs of the run before, without moving them or the outputs."""

    def steps(self) -> Generator[Work, None, None]:
        """Compute the outputs of the inputs command by command: each launch, copy or fill when it is done."""

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of bytes of the program's memory, as uint8."""

    def close(self) -> None:
        """Give everything back."""


class Executable:
    """A plan, ready to run: each program is loaded when it is first asked for. Threads may share it: calls take turns.

    All programs see the same weights and the same state. Ctrl-C ends a run between two commands, and
    the executable stays usable. A process that was forked after the load has to load again: threads
    and GPU stay with the process that loaded.
    """

    def __init__(self, plan: Plan, *, poison: bool = False) -> None:
        """Of a plan that was checked; see `load`."""
        self.plan = plan
        self._poison = poison
        self._signatures = {name: Signature(name, programs) for name, programs in plan.entries.items()}
        self._backends: dict[str, Backend] = {}
        self._own_lock = threading.Lock()
        self._closed = False
        self._steps: Generator[Work, None, None] | None = None
        self._process = os.getpid()
        self._current = plan.programs[0]  # which `replay` and `read` are about
        self._load(self._current)
        _live.add(self)

    def __repr__(self) -> str:
        programs = ", ".join(map(repr, self.plan.programs[:_LISTED]))
        return f"Executable({programs}{', ...' if len(self.plan.programs) > _LISTED else ''})"

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the plan's entries, each of which `entry` gives."""
        return tuple(self._signatures)

    def entry(self, name: str | None = None) -> "Entry":
        """The entry called ``name``: without one, the only one there is, or "main". Raises InputError."""
        return Entry(self, self._signature(name))

    @property
    def program(self) -> Program:
        """The first program of the entry that is meant where none is named."""
        return self._signature(None).programs[0]

    @property
    def backend(self) -> Backend:
        """What runs `program`."""
        with self._lock:
            self._check_ready(self._steps)
            return self._load(self.program)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of `program`, each with name, shape and dtype."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of `program`, each with name, shape and dtype."""
        return self.program.outputs

    def __call__(
        self, *args: np.ndarray, entry: str | None = None, **kwargs: np.ndarray
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run an entry on arrays given in the plan's order, by name, or both; their shapes choose its program.

        One output comes back as an array, several as a tuple in the plan's order. An input whose name
        is "entry" is given by position, or to what `entry` returns.
        """
        return self._call(self._signature(entry), args, kwargs)

    def run(self, arrays: Mapping[str, np.ndarray], *, entry: str | None = None) -> dict[str, np.ndarray]:
        """Run an entry on arrays by input name: the outputs by name, in the plan's order."""
        return self._run(self._signature(entry), arrays)

    def steps(self, arrays: Mapping[str, np.ndarray], *, entry: str | None = None) -> Generator[Work, None, None]:
        """Run an entry on arrays by input name, one command after the other in issue order.

        Gives each launch, copy or fill when it is done; what it wrote can be had of `read`. Until the
        generator is exhausted, closed or dropped, every other run raises InputError.
        """
        program, checked = self._signature(entry).choose(arrays)
        with self._lock:
            self._check_ready()
            steps = self._load(program).steps()
        try:
            with self._lock:
                self._check_ready()
                self._steps = steps
                self._place(program, checked)
            while True:
                with self._lock:
                    self._check_ready(steps)
                    work = next(steps, None)
                if work is None:
                    return
                yield work
        finally:
            if self._steps is steps:  # without the lock: this thread may hold it where it drops the generator
                self._steps = None

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the memory of the program run last, between two `steps`, as uint8.

        Raises InputError where the region does not hold them.
        """
        held = region_sizes(self.plan, self._current).get((pointer.region, pointer.index), 0)
        if not 0 <= pointer.offset <= pointer.offset + nbytes <= held:
            region = f"{pointer.region.name}({pointer.index})"
            raise InputError(f"read: {nbytes} bytes at {pointer.offset} lie outside {region} ({held} bytes)")
        with self._lock:
            self._check_ready(self._steps)
            return self._load(self._current).read(pointer, nbytes)

    def replay(self) -> None:
        """Run again on the inputs of the run before; nothing is copied to or from the caller."""
        with self._lock:
            self._check_ready()
            self._load(self._current).replay()

    def _call(
        self, signature: Signature, args: Sequence[np.ndarray], kwargs: Mapping[str, np.ndarray]
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        results = tuple(self._run(signature, signature.by_name(args, kwargs)).values())
        return results[0] if len(results) == 1 else results

    def _run(self, signature: Signature, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        program, checked = signature.choose(arrays)
        with self._lock:
            self._check_ready()
            backend = self._place(program, checked)
            backend.run()
            return {t.name: v.copy() for t, v in zip(program.outputs, backend.outputs, strict=True)}

    def _signature(self, name: str | None) -> Signature:
        if name is None and len(self._signatures) == 1:
            (name,) = self._signatures
        found = self._signatures.get("main" if name is None else name)
        if found is None:
            what = "no entry is named" if name is None else f"entry {name!r}: not found"
            raise InputError(f"{what}, the plan has {list(self._signatures)}")
        return found

    def _load(self, program: Program) -> Backend:
        """What runs ``program``, loaded now if it was not before."""
        if program.name not in self._backends:
            beside = next(iter(self._backends.values()), None)
            self._backends[program.name] = _backend(self.plan, program, beside, poison=self._poison)
        return self._backends[program.name]

    def _place(self, program: Program, arrays: Sequence[np.ndarray]) -> Backend:
        """Give a program its inputs: what runs it."""
        backend = self._load(program)
        self._current = program
        for view, array in zip(backend.inputs, arrays, strict=True):
            np.copyto(view, array)
        return backend

    @property
    def _lock(self) -> threading.Lock:
        """Whose turn it is. A child may have been forked while a thread held it, which no child has."""
        if os.getpid() != self._process:
            raise InputError(f"this executable was loaded in process {self._process}: load the plan again in this one")
        return self._own_lock

    def _check_ready(self, steps: Generator[Work, None, None] | None = None) -> None:
        """Raise InputError unless it is open and nothing but ``steps`` is half done."""
        if self._closed:
            raise InputError("this executable is closed: load the plan again")
        if self._steps is not steps:
            raise InputError("a run by steps() is half done: exhaust it or close it first")

    def close(self) -> None:
        """Give back memory, streams and graph; calling it twice is harmless.

        Waits for the run of another thread. In a forked process it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                for backend in reversed(self._backends.values()):  # the first one has what all of them share
                    backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Entry:
    """One entry of an executable. ``name``; ``programs`` are those of its profiles."""

    def __init__(self, executable: Executable, signature: Signature) -> None:
        self.name = signature.name
        self.programs = signature.programs
        self._executable = executable
        self._signature = signature

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {len(self.programs)} programs)"

    def __call__(self, *args: np.ndarray, **kwargs: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        """As a call of the executable that names this entry."""
        return self._executable._call(self._signature, args, kwargs)  # noqa: SLF001

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As `Executable.run`."""
        return self._executable.run(arrays, entry=self.name)


_live: weakref.WeakSet[Executable] = weakref.WeakSet()


@atexit.register
def _wait_for_runs() -> None:
    """Let the runs of daemon threads end, and none begin: the locks are kept.

    A thread that came back from ONNX Runtime when the interpreter is gone would abort the process.
    """
    for executable in tuple(_live):
        if executable._process == os.getpid():  # noqa: SLF001
            executable._own_lock.acquire(timeout=_LAST_RUN_S)  # noqa: SLF001


def _keep_for_ever() -> None:
    """In a forked child, let nothing be given back: a session's end waits for threads that no child has."""
    for executable in tuple(_live):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(executable._backends))  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)


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
    poison: bool = False,
    copy: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Executable:
    """Load a plan on this machine: a `Plan`, the path of a plan file, or the bytes of one.

    A file is mapped, and weights of the CPU target are used where it lies: it may be replaced while
    the executable lives, but not be overwritten in place or cut short. ``copy`` reads it into memory
    first, and what becomes of the file does not matter. ``limits`` is what the plan may ask of this
    machine; a plan beyond them is refused before anything is allocated. ``poison`` fills memory that
    nothing should read with 0xFF bytes. ``program`` is the name of the one to load where the others
    will not be called.

    Raises PlanError for a plan that is damaged or contradicts itself, DeviceMismatchError where this
    machine cannot run it, and InputError for a ``plan`` or ``program`` that is none.
    """
    if isinstance(plan, Plan):
        if problems := list(verify.problems(plan, limits)):
            raise PlanInvalidError(problems)
        return _loaded(plan, program, limits, poison=poison)
    image, path = container.open_image(plan, copy=copy), container.name(plan)
    parsed = container.parse(image, path, limits)
    if parsed.target is Target.CPU:
        container.verify_digest(image, path)
        return _loaded(parsed, program, limits, poison=poison)
    with ThreadPoolExecutor(1) as pool:
        # Hashing takes as long as starting the GPU; no code is handed over before both are done.
        digest = pool.submit(container.verify_digest, image, path)
        with closing(_start_device(parsed)):
            digest.result()
            return _loaded(parsed, program, limits, poison=poison)


def _start_device(plan: Plan) -> "Context":
    """Start the GPU that a plan needs: the context keeps it started."""
    from nimblert import driver  # each target imports only what it runs on

    driver.initialise()
    driver.check_device(plan.device, driver.describe())
    return driver.Context()


def _loaded(plan: Plan, name: str | None, limits: Limits, *, poison: bool) -> Executable:
    selected = _select(plan, name)
    for program in selected.programs:
        if unordered := tuple(hazards(program, limits)):
            raise PlanInvalidError(unordered)
    return Executable(selected, poison=poison)


def _backend(plan: Plan, program: Program, beside: Any, *, poison: bool) -> Backend:
    """What runs a program on the plan's target, with the weights, state and arena of ``beside``."""
    if plan.target is Target.CPU:
        from nimblert.cpu import CpuBackend

        return CpuBackend(plan, program, poison=poison, beside=beside)
    from nimblert.cuda import CudaBackend

    return CudaBackend(plan, program, poison=poison, beside=beside)
