"""Replay a plan's golden record in a process of its own: ``python -m nimblert.replay TARGET [THREADS]``.

TARGET is "cpu" or "cuda", THREADS the number of threads that a CPU plan computes with.

The path of the plan is read from standard input, so that the process can start before the plan exists. In that process
torch, onnx, triton and nimblec cannot be imported, and memory is poisoned first. Prints one JSON object: the verdict
and difference of every output of every program, and the seconds that each part took.
"""

import json
import os
import sys
import time
from contextlib import closing, nullcontext

_FRAMEWORKS = ("torch", "onnx", "triton", "nimblec")


def main(target: str, threads: int | None = None) -> int:
    """Check every program of the plan, which is for ``target``; the exit status."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    sys.stdout = sys.stderr
    for name in _FRAMEWORKS:
        sys.modules[name] = None  # type: ignore[assignment]  # makes an import of it raise
    seconds: dict[str, float] = {}

    def lap(name: str, begin: float) -> float:
        now = time.perf_counter()
        seconds[name] = round(seconds.get(name, 0.0) + now - begin, 4)
        return now

    now = time.perf_counter()
    from nimblert import golden
    from nimblert.check.verify import read_plan
    from nimblert.cuda import driver
    from nimblert.loading import load

    if target == "cuda":
        driver.initialise()
    lap("import", now)
    path = os.fsdecode(sys.stdin.buffer.read())
    now = time.perf_counter()
    plan = read_plan(path)
    lap("read", now)
    verdicts = []
    # Each load would make the GPU's context anew.
    with closing(driver.Context()) if target == "cuda" else nullcontext():
        for program in plan.programs:
            now = time.perf_counter()
            # each from the initial state
            with load(plan, program=program.name, threads=threads, poison=True) as loaded:
                now = lap("load", now)
                record = program.golden
                if record is None:
                    sys.stderr.write(f"{path}: program {program.name!r} has no golden record\n")
                    return 2
                inputs = golden.draw_inputs(program, record.seed)
                now = lap("draw inputs", now)
                outputs = list(loaded.run(inputs).values())
                lap("first run", now)
                again = list(loaded.run(inputs).values())
            compared = golden.check(record, outputs)
            repeated = golden.check(golden.record(record.seed, outputs, record.tolerance), again)
            verdicts += [
                {
                    "program": program.name,
                    "name": t.name if len(plan.programs) == 1 else f"{t.name} of {program.name}",
                    "verdict": c.verdict.value,
                    "difference": c.difference,
                    "repeat": "not the same state" if plan.state else r.verdict.value,
                }
                for t, c, r in zip(program.outputs, compared, repeated, strict=True)
            ]
    with answer:
        json.dump({"outputs": verdicts, "seconds": seconds}, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
