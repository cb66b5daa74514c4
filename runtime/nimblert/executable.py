"""Executable: a loaded plan that can be called; the one stateful object of the runtime."""

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from nimblert import container, verify
from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError, PlanInvalidError
from nimblert.hazards import hazards
from nimblert.limits import DEFAULT_LIMITS, Limits
from nimblert.plan import Plan, Pointer, Program, Region, Target, Tensor, Work

if TYPE_CHECKING:
    from nimblert.driver import Context

_LAST_RUN_S = 10.0
"""How long the end of the interpreter waits for a run of a daemon thread."""


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
    """One program of a plan, ready to run. Threads may share it: calls take turns.

    Ctrl-C ends a run between two commands, and the executable stays usable. A process that was
    forked after the load has to load again: threads and GPU stay with the process that loaded.
    """

    def __init__(self, plan: Plan, program: Program, backend: Backend) -> None:
        self.plan = plan
        self.program = program
        self.backend = backend
        self._sizes = {
            (Region.ARENA, 0): program.arena_nbytes,
            (Region.WEIGHTS, 0): plan.weights_nbytes,
            (Region.STATE, 0): plan.state_nbytes,
            **{(Region.INPUT, i): nbytes for i, nbytes in enumerate(program.input_nbytes)},
            **{(Region.OUTPUT, i): nbytes for i, nbytes in enumerate(program.output_nbytes)},
        }
        self._own_lock = threading.Lock()
        self._closed = False
        self._steps: Generator[Work, None, None] | None = None
        self._process = os.getpid()
        _live.add(self)

    def __repr__(self) -> str:
        return f"Executable({self.program!r})"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs, each with name, shape and dtype."""
        return self.program.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs, each with name, shape and dtype."""
        return self.program.outputs

    def __call__(self, *args: np.ndarray, **kwargs: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        """Run on arrays given in the plan's order, by name, or both.

        One output comes back as an array, several as a tuple in the plan's order.
        """
        names = [t.name for t in self.inputs]
        if len(args) > len(names):
            raise InputError(f"inputs: {len(args)} arrays were given, the plan takes {len(names)}: {names}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise InputError(f"input {min(twice)!r} was given by position and by name: give it once")
        results = tuple(self.run({**given, **kwargs}).values())
        return results[0] if len(results) == 1 else results

    def run(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run on arrays by input name: the outputs by name, in the plan's order."""
        checked = self._check(arrays)
        with self._lock:
            self._check_ready()
            self._place(checked)
            self.backend.run()
            return {t.name: v.copy() for t, v in zip(self.outputs, self.backend.outputs, strict=True)}

    def steps(self, arrays: Mapping[str, np.ndarray]) -> Generator[Work, None, None]:
        """Run on arrays by input name, one command after the other in issue order.

        Gives each launch, copy or fill when it is done; what it wrote can be had of `read`. Until the
        generator is exhausted, closed or dropped, every other run raises InputError.
        """
        checked = self._check(arrays)
        steps = self.backend.steps()
        try:
            with self._lock:
                self._check_ready()
                self._steps = steps
                self._place(checked)
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
        """A copy of ``nbytes`` bytes of the program's memory between two `steps`, as uint8.

        Raises InputError where the region does not hold them.
        """
        held = self._sizes.get((pointer.region, pointer.index), 0)
        if not 0 <= pointer.offset <= pointer.offset + nbytes <= held:
            region = f"{pointer.region.name}({pointer.index})"
            raise InputError(f"read: {nbytes} bytes at {pointer.offset} lie outside {region} ({held} bytes)")
        with self._lock:
            self._check_ready(self._steps)
            return self.backend.read(pointer, nbytes)

    def replay(self) -> None:
        """Run again on the inputs of the run before; nothing is copied to or from the caller."""
        with self._lock:
            self._check_ready()
            self.backend.replay()

    def _place(self, arrays: Sequence[np.ndarray]) -> None:
        for view, array in zip(self.backend.inputs, arrays, strict=True):
            np.copyto(view, array)

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

    def _check(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        if not isinstance(arrays, Mapping):
            raise InputError(f"inputs: got {type(arrays).__name__}, expected a dict of arrays by input name")
        expected = {t.name: t for t in self.inputs}
        if unknown := [n for n in arrays if n not in expected]:
            raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(expected)}")
        if missing := [n for n in expected if n not in arrays]:
            raise InputError(f"input {missing[0]!r} is missing: the plan takes {list(expected)}")
        return [_checked(t, arrays[t.name]) for t in self.inputs]

    def close(self) -> None:
        """Give back memory, streams and graph; calling it twice is harmless.

        Waits for the run of another thread. In a forked process it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(executable.backend))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_ever)


def _checked(tensor: Tensor, value: np.ndarray) -> np.ndarray:
    if not isinstance(value, np.ndarray | np.generic):
        raise InputError(
            f"input {tensor.name!r}: got {type(value).__name__}, expected a numpy array:"
            f" use numpy.asarray(value, {tensor.dtype!r})"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"input {tensor.name!r}: a plan knows no masks: give what masked values stand for, .filled(0)")
    if value.dtype != numpy_dtype(tensor.dtype):
        raise InputError(
            f"input {tensor.name!r}: dtype {value.dtype}, expected {tensor.dtype}: use .astype({tensor.dtype!r})"
        )
    if value.shape != tensor.shape:
        raise InputError(f"input {tensor.name!r}: shape {value.shape}, expected {tensor.shape}")
    return np.asarray(value)


def select_program(plan: Plan, name: str | None) -> Program:
    """The program called ``name``, or the first one."""
    if name is None:
        return plan.programs[0]
    for program in plan.programs:
        if program.name == name:
            return program
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
    nothing should read with 0xFF bytes.

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
    program = select_program(plan, name)
    if unordered := tuple(hazards(program, limits)):
        raise PlanInvalidError(unordered)
    return Executable(plan, program, _backend(plan, program, poison=poison))


def _backend(plan: Plan, program: Program, *, poison: bool) -> Backend:
    if plan.target is Target.CPU:
        from nimblert.cpu import CpuBackend

        return CpuBackend(plan, program, poison=poison)
    from nimblert.cuda import CudaBackend

    return CudaBackend(plan, program, poison=poison)
