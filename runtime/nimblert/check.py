"""Replay a plan's golden record in a process of its own: ``python -m nimblert.check PLAN``.

Importing torch, onnx or triton raises in that process, and memory is poisoned first. Prints one
JSON object: the verdict and difference of every output, and the seconds that each part took.
"""

import json
import sys
import time

_FRAMEWORKS = ("torch", "onnx", "triton", "nimblec")


def main(path: str) -> int:
    """Check the first program of the plan at ``path``."""
    for name in _FRAMEWORKS:
        sys.modules[name] = None  # type: ignore[assignment]  # makes an import of it raise
    seconds = {}

    def lap(name: str, begin: float) -> float:
        now = time.perf_counter()
        seconds[name] = round(now - begin, 4)
        return now

    now = time.perf_counter()
    from nimblert import container, executable, golden
    from nimblert.onnx_session import share_thread_pool
    from nimblert.plan import Target

    now = lap("import", now)
    plan = container.read(path)
    if plan.target is Target.CPU:
        share_thread_pool()
    now = lap("read", now)
    with executable.load(plan, poison=True) as loaded:
        now = lap("load", now)
        record = loaded.program.golden
        if record is None:
            sys.stderr.write(f"{path}: the plan has no golden record\n")
            return 2
        inputs = golden.draw_inputs(loaded.program, record.seed)
        now = lap("draw inputs", now)
        outputs = list(loaded.run(inputs).values())
        lap("first run", now)
        again = list(loaded.run(inputs).values())
        compared = golden.check(record, outputs)
        repeated = golden.check(golden.record(record.seed, outputs, record.tolerance), again)
    verdicts = [
        {
            "name": t.name,
            "verdict": c.verdict.value,
            "difference": c.difference,
            "repeat": "not the same state" if plan.state else r.verdict.value,
        }
        for t, c, r in zip(loaded.outputs, compared, repeated, strict=True)
    ]
    json.dump({"outputs": verdicts, "seconds": seconds}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
