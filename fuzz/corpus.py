"""Run plan files that were found or kept, each in a child of its own: ``python -m fuzz.corpus FILE ...``."""

import sys
from pathlib import Path

import numpy as np

from fuzz import guarded
from fuzz.campaign import Fuzzer, main
from nimblert import container, golden
from nimblert.errors import DeviceMismatchError, InputError, PlanError
from nimblert.executable import Executable, load
from nimblert.plan import Program


def judge(file: bytes) -> str:
    """What becomes of a plan file: read, loaded, and each program run twice. Raises where it is none of what may."""
    image = memoryview(file)
    try:
        container.check_frame(image, "file")
        plan = container.parse(image, "file")
        executable = load(plan, poison=True)
    except PlanError:
        return "refused"
    except (DeviceMismatchError, MemoryError):
        return "too large"
    try:
        for program in plan.programs:
            _run_twice(executable, program)
    except InputError:
        return "fails"
    except PlanError:
        return "refused"
    except MemoryError:
        return "too large"
    finally:
        executable.close()
    return "runs"


def _run_twice(executable: Executable, program: Program) -> None:
    inputs = golden.draw_inputs(program, 0)
    first, second = (executable.run(inputs, entry=program.entry) for _ in range(2))
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes() and not _is_nan(array) and not executable.plan.state_nbytes:
            raise AssertionError(f"output {name!r} differs from run to run")


def _is_nan(array: np.ndarray) -> bool:
    """Whether the array has a NaN, whose bits may differ."""
    return array.dtype.kind not in "biu" and bool((array != array).any())  # noqa: PLR0124 - NaN is not itself


if __name__ == "__main__":
    FILES = [Path(name).read_bytes() for name in sys.argv[1:]]
    fuzzer = Fuzzer(name="corpus", build=lambda _seed, number, _note: FILES[number], judge=judge, start=guarded.install)
    sys.exit(main(fuzzer, ["--runs", str(len(FILES)), "--seconds", "1e9", "--keep-going"]))
