"""Run plan files that were found or kept, each in a child of its own: ``python -m fuzz.corpus FILE ...``."""

import sys
from pathlib import Path

import numpy as np

from fuzz import guarded
from fuzz.campaign import Fuzzer, main
from nimblert import container, golden
from nimblert.errors import DeviceMismatchError, InputError, PlanError
from nimblert.executable import load


def judge(file: bytes) -> str:
    """What becomes of a plan file that is read, loaded and run twice; raises where it is none of what may."""
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
        inputs = golden.draw_inputs(executable.program, 0)
        first, second = executable.run(inputs), executable.run(inputs)
    except InputError:
        return "fails"
    except MemoryError:
        return "too large"
    finally:
        executable.close()
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes() and not _is_nan(array):
            raise AssertionError(f"output {name!r} differs from run to run")
    return "runs"


def _is_nan(array: np.ndarray) -> bool:
    """Whether the array has a NaN, whose bits may differ."""
    return array.dtype.kind not in "biu" and bool((array != array).any())  # noqa: PLR0124 - NaN is not itself


if __name__ == "__main__":
    FILES = [Path(name).read_bytes() for name in sys.argv[1:]]
    fuzzer = Fuzzer(name="corpus", build=lambda _seed, number, _note: FILES[number], judge=judge, start=guarded.install)
    sys.exit(main(fuzzer, ["--runs", str(len(FILES)), "--seconds", "1e9", "--keep-going"]))
