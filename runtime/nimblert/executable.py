"""Executable: a loaded plan that can be called; the one stateful object of the runtime."""

import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from nimblert import container, verify
from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError, PlanInvalidError
from nimblert.hazards import hazards
from nimblert.plan import Plan, Pointer, Program, Target, Tensor, Work

if TYPE_CHECKING:
    from nimblert.driver import Context


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
    """One program of a plan, ready to run. Threads may share it: calls take turns."""

    def __init__(self, plan: Plan, program: Program, backend: Backend) -> None:
        self.plan = plan
        self.program = program
        self.backend = backend
        self._lock = threading.Lock()
        self._closed = False

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
            self._place(checked)
            self.backend.run()
            return {t.name: v.copy() for t, v in zip(self.outputs, self.backend.outputs, strict=True)}

    def steps(self, arrays: Mapping[str, np.ndarray]) -> Generator[Work, None, None]:
        """Run on arrays by input name, one command after the other in issue order.

        Gives each launch, copy or fill when it is done; what it wrote can be had of `read`.
        """
        checked = self._check(arrays)
        with self._lock:
            self._place(checked)
            yield from self.backend.steps()

    def read(self, pointer: Pointer, nbytes: int) -> np.ndarray:
        """A copy of ``nbytes`` bytes of the program's memory between two `steps`, as uint8."""
        return self.backend.read(pointer, nbytes)

    def _place(self, arrays: Sequence[np.ndarray]) -> None:
        self._check_open()
        for view, array in zip(self.backend.inputs, arrays, strict=True):
            np.copyto(view, array)

    def replay(self) -> None:
        """Run again on the inputs of the run before; nothing is copied to or from the caller."""
        with self._lock:
            self._check_open()
            self.backend.replay()

    def _check(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        expected = {t.name: t for t in self.inputs}
        if unknown := [n for n in arrays if n not in expected]:
            raise InputError(f"input {unknown[0]!r} is not one of the plan's inputs {list(expected)}")
        if missing := [n for n in expected if n not in arrays]:
            raise InputError(f"input {missing[0]!r} is missing: the plan takes {list(expected)}")
        return [_checked(t, arrays[t.name]) for t in self.inputs]

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this executable is closed: load the plan again")

    def close(self) -> None:
        """Give back memory, streams and graph; calling it twice is harmless."""
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


def _checked(tensor: Tensor, value: np.ndarray) -> np.ndarray:
    if not isinstance(value, np.ndarray | np.generic):
        raise InputError(f"input {tensor.name!r}: got {type(value).__name__}, expected a numpy array")
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


def load(plan: Plan | str | PathLike[str], *, program: str | None = None, poison: bool = False) -> Executable:
    """Load a plan, or a plan file, on this machine.

    ``poison`` fills memory that nothing should read with 0xFF bytes first. Raises PlanError for a
    plan that is damaged or contradicts itself, DeviceMismatchError where this machine cannot run it.
    """
    if isinstance(plan, Plan):
        if problems := list(verify.problems(plan)):
            raise PlanInvalidError(problems)
        return _loaded(plan, program, poison=poison)
    image = container.map_file(plan)
    with ThreadPoolExecutor(1) as pool, ExitStack() as started:
        # Hashing takes as long as starting the GPU; no code is handed over before both are done.
        digest = pool.submit(container.verify_digest, image, plan)
        parsed = container.parse(image, plan)
        if parsed.target is Target.CUDA:
            started.callback(_start_device(parsed).close)
        digest.result()
        return _loaded(parsed, program, poison=poison)


def _start_device(plan: Plan) -> "Context":
    """Start the GPU that a plan needs: the context keeps it started."""
    from nimblert import driver  # each target imports only what it runs on

    driver.initialise()
    driver.check_device(plan.device, driver.describe())
    return driver.Context()


def _loaded(plan: Plan, name: str | None, *, poison: bool) -> Executable:
    program = select_program(plan, name)
    if unordered := tuple(hazards(program)):
        raise PlanInvalidError(unordered)
    return Executable(plan, program, _backend(plan, program, poison=poison))


def _backend(plan: Plan, program: Program, *, poison: bool) -> Backend:
    if plan.target is Target.CPU:
        from nimblert.cpu import CpuBackend

        return CpuBackend(plan, program, poison=poison)
    from nimblert.cuda import CudaBackend

    return CudaBackend(plan, program, poison=poison)
