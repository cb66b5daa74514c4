"""Run the plan files of findings or of the corpus: ``python -m fuzz.corpus FILE ...``."""

import sys
from pathlib import Path

import numpy as np

from fuzz import guarded
from fuzz.campaign import Fuzzer, main
from nimblert import golden
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check.verify import parse_plan
from nimblert.errors import DeviceMismatchError, InputError, PlanError
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Plan, Program, Target, container


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


def excuse(file: bytes, hung: bool) -> str:
    """Return "loops on" for a file whose own loop may be endless, "" for any other."""
    return "loops on" if hung and _holds(parse_plan(memoryview(file), "file"), b"Loop") else ""


def _run(executable: Executable) -> str:
    try:
        for program in executable.plan.programs:
            _run_twice(executable, program)
        if weights := executable.weights:
            executable.refit({name: np.ones(w.shape, numpy_dtype(w.dtype)) for name, w in weights.items()})
            _run_twice(executable, executable.plan.programs[0])
    except InputError:
        return "fails"
    return "runs"


def _run_twice(executable: Executable, program: Program) -> None:
    inputs = golden.draw_inputs(program, 0)
    first, second = (executable.run(inputs, entry=program.entry) for _ in range(2))
    if executable.plan.state_nbytes or _holds(executable.plan, b"Dropout"):
        return  # an input may put dropout into training mode
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes() and not _is_nan(array):
            raise AssertionError(f"output {name!r} differs from run to run")


def _holds(plan: Plan, operator: bytes) -> bool:
    return any(operator in module.code.tobytes() for module in plan.modules)


def _is_nan(array: np.ndarray) -> bool:
    """Return whether the array has a NaN: its bits may differ between runs."""
    return array.dtype.kind not in "biu" and bool((array != array).any())  # noqa: PLR0124 - NaN is not itself


if __name__ == "__main__":
    FILES = [Path(name).read_bytes() for name in sys.argv[1:]]
    fuzzer = Fuzzer(
        name="corpus",
        build=lambda _seed, number, _note: FILES[number],
        judge=judge,
        start=guarded.install,
        excuse=excuse,
    )
    sys.exit(main(fuzzer, ["--runs", str(len(FILES)), "--seconds", "1e9", "--keep-going"]))
