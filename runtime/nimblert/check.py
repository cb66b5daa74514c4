"""Replay a plan's golden record in a process of its own: ``python -m nimblert.check PLAN``.

Importing torch, onnx or triton raises in that process, and memory is poisoned first. Prints one
JSON object: the verdict and difference of every output, and the seconds that each part took.
"""

import json
import sys
import time

_FRAMEWORKS = ("torch", "onnx", "triton", "nimblec")


def main(path: str, dump: str | None) -> int:
    """Check the first program of the plan at ``path``; ``dump`` names a file for the outputs (.npz)."""
    for name in _FRAMEWORKS:
        sys.modules[name] = None  # type: ignore[assignment]  # makes an import of it raise
    seconds = {}

    def lap(name: str, begin: float) -> float:
        now = time.perf_counter()
        seconds[name] = round(now - begin, 4)
        return now

    now = time.perf_counter()
    import numpy as np

    from nimblert import container, executable, golden

    now = lap("import", now)
    plan = container.read(path)
    now = lap("read", now)
    with executable.load(plan, poison=True) as loaded:
        now = lap("load", now)
        record = loaded.program.golden
        if record is None:
            sys.stderr.write(f"{path}: the plan has no golden record\n")
            return 2
        inputs = golden.draw_inputs(loaded.program, record.seed)
        now = lap("draw inputs", now)
        outputs = loaded.run(inputs)
        lap("first run", now)
        again = loaded.run(inputs)
        compared = golden.check(record, list(outputs.values()))
        repeated = golden.check(golden.record(record.seed, list(outputs.values()), record.tolerance), list(again.values()))
    if dump:
        np.savez(dump, **{f"output_{i}": v.view(np.uint8) if v.ndim else v for i, v in enumerate(outputs.values())})
    verdicts = [
        {"name": name, "verdict": c.verdict.value, "difference": c.difference, "repeat": r.verdict.value}
        for name, c, r in zip(outputs, compared, repeated, strict=True)
    ]
    json.dump({"outputs": verdicts, "seconds": seconds}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
