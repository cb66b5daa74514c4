"""Run the plan files of findings or of the corpus: ``python -m fuzz.corpus FILE ...``."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fuzz import guarded
from fuzz.campaign import Fuzzer, main
from nimblert import golden
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check.verify import parse_plan
from nimblert.errors import DeviceMismatchError, InputError, PlanError
from nimblert.executable import Executable, load
from nimblert.plan import Program, Target, container

RUN_CPU_S = 5.0
"""CPU time after which a run is interrupted: a plan's own loop may be endless, but an interrupt must end it."""
RUN_S = 60.0
"""The same in wall-clock time, with allowance for a busy machine."""
_LOOK_S = 0.1


def judge(file: bytes) -> str:
    """Return the outcome of a plan file, which is loaded, each program run twice, and run again with other weights.

    Raises on any outcome that is not allowed.
    """
    image = memoryview(file)
    try:
        container.check_frame(image, "file")
        plan = parse_plan(image, "file")
        threads = 2 if plan.target is Target.CPU else None  # more would spin on busy cores
        executable = load(plan, poison=True, threads=threads)
        try:
            return _run(executable)
        finally:
            executable.close()
    except PlanError:
        return "refused"
    except DeviceMismatchError:
        return "another CPU"
    except MemoryError:
        return "too large"


def _run(executable: Executable) -> str:
    try:
        with _interrupted_after(RUN_CPU_S, RUN_S):
            for program in executable.plan.programs:
                _run_twice(executable, program)
            if weights := executable.weights:
                executable.refit({name: np.ones(w.shape, numpy_dtype(w.dtype)) for name, w in weights.items()})
                _run_twice(executable, executable.plan.programs[0])
    except KeyboardInterrupt:
        if not any(kernel.symbol == "Loop" for kernel in executable.plan.kernels):
            raise AssertionError("it hangs, and has no loop") from None
        return "loops on"
    except InputError:
        return "fails"
    return "runs"


def _run_twice(executable: Executable, program: Program) -> None:
    inputs = golden.draw_inputs(program, 0)
    first, second = (executable.run(inputs, entry=program.entry) for _ in range(2))
    if executable.plan.state_nbytes or _draws(executable):
        return
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes() and not _is_nan(array):
            raise AssertionError(f"output {name!r} differs from run to run")


def _draws(executable: Executable) -> bool:
    """Return whether a run may draw random numbers: an input may put dropout into training mode."""
    return any(b"Dropout" in module.code.tobytes() for module in executable.plan.modules)


@contextmanager
def _interrupted_after(cpu_seconds: float, seconds: float) -> Iterator[None]:
    """Interrupt the block, as Ctrl-C does, after some CPU time of the process or some wall-clock time."""
    cpu_end, end = time.process_time() + cpu_seconds, time.monotonic() + seconds

    def look(_number: int, _frame: object) -> None:
        if time.process_time() < cpu_end and time.monotonic() < end:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, look)  # SIGPROF would not wake a main thread that waits for another
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_nan(array: np.ndarray) -> bool:
    """Return whether the array has a NaN: its bits may differ between runs."""
    return array.dtype.kind not in "biu" and bool((array != array).any())  # noqa: PLR0124 - NaN is not itself


if __name__ == "__main__":
    FILES = [Path(name).read_bytes() for name in sys.argv[1:]]
    fuzzer = Fuzzer(name="corpus", build=lambda _seed, number, _note: FILES[number], judge=judge, start=guarded.install)
    sys.exit(main(fuzzer, ["--runs", str(len(FILES)), "--seconds", "1e9", "--keep-going"]))
