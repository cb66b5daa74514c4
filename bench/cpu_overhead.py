"""What running node by node costs on the CPU: a plan against a whole-model ONNX Runtime session.

    python bench/cpu_overhead.py [--repeats 200] [--threads N] [--streams] [--shared-pool] [--json FILE]

Models come from tests/families in their full width with random weights, batch 1. Plan and session
take turns on the same input, so that both see the same neighbours on a busy machine; the results must
be equal bit for bit. Prints the median, 5th and 95th percentile of each in milliseconds, the ratio of
the medians, and the seconds to open each. ``--threads 1`` holds the whole process on one core.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "resnet18 64 px": ("resnet", "ResNet", (1, 3, 64, 64)),
    "resnet18 128 px": ("resnet", "ResNet", (1, 3, 128, 128)),
    "mobilenet-v2 128 px": ("mobilenet", "MobileNet", (1, 3, 128, 128)),
    "inception-like 96 px": ("inception", "Inception", (1, 3, 96, 96)),
    "unet 64 px": ("unet", "UNet", (1, 3, 64, 64)),
    "bert, 2 layers, 16 tokens": ("bert", "", ()),
}


def export(family: str, builder: str, shape: tuple[int, ...], path: Path) -> None:
    """Write the ONNX file of a case; without a builder, of the family's small model."""
    import torch

    torch.manual_seed(0)
    module = importlib.import_module(f"families.{family}")
    model, args = (getattr(module, builder)().eval(), (torch.randn(shape),)) if builder else module.small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, args, path, dynamo=False)


def take_turns(runs: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Milliseconds of each of ``repeats`` calls (rows) of each function (columns), after 20 warm-ups.

    Ten calls of the one, then ten of the other: switching at each call would make each find the
    caches and the threads of the other.
    """
    times = np.empty((repeats, len(runs)))
    for first in range(0, repeats, 10):
        for column, run in enumerate(runs):
            for _ in range(20 if first == 0 else 2):
                run()
            for row in range(first, min(first + 10, repeats)):
                begin = time.perf_counter()
                run()
                times[row, column] = (time.perf_counter() - begin) * 1e3
    return times


def measure(path: Path, repeats: int, *, threads: int, shared: bool, many_streams: bool) -> dict[str, Any]:
    """One model: the plan's and the session's times, and what the plan is made of."""
    import onnxruntime
    from cpu_plans import plan_file

    from nimblert import golden
    from nimblert.cpu import CpuBackend

    plan = plan_file(path, streams=None if many_streams else 1)
    program = plan.programs[0]
    inputs = golden.draw_inputs(program, 0)
    begin = time.perf_counter()
    backend = CpuBackend(plan, program)
    plan_open = time.perf_counter() - begin
    begin = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.use_per_session_threads = not shared
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    session_open = time.perf_counter() - begin
    for tensor, view in zip(program.inputs, backend.inputs, strict=True):
        np.copyto(view, inputs[tensor.name])
    times = take_turns([backend.run, lambda: session.run(None, inputs)], repeats)
    equal = all(map(np.array_equal, backend.outputs, session.run(None, inputs)))
    backend.close()
    ours, theirs = (
        dict(zip(("p5", "median", "p95"), np.percentile(column, (5, 50, 95)).round(4).tolist(), strict=True))
        for column in times.T
    )
    return {
        "launches": len(program.ops),
        "kernels": len(plan.kernels),
        "streams": program.stream_count,
        "plan_ms": ours,
        "session_ms": theirs,
        "ratio": round(ours["median"] / theirs["median"], 4),
        "plan_open_s": round(plan_open, 4),
        "session_open_s": round(session_open, 4),
        "bit_exact": equal,
    }


def main() -> None:
    """Measure every case and print a table."""
    from nimblert import onnx_session

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0, help="cores, and threads of the session; 0: all")
    parser.add_argument("--streams", action="store_true", help="as many streams as can run side by side")
    parser.add_argument("--shared-pool", action="store_true", help="one thread pool for plan and session")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.shared_pool:
        onnx_session.share_thread_pool()
    cores = sorted(os.sched_getaffinity(0))[: options.threads or None]
    os.sched_setaffinity(0, cores)
    results = {}
    print(f"{len(cores)} cores; milliseconds, median (p5 to p95)")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            path = Path(folder, "model.onnx")
            export(*case, path)
            result = results[name] = measure(
                path, options.repeats, threads=options.threads, shared=options.shared_pool, many_streams=options.streams
            )
            ours, theirs = (
                f"{t['median']:.3f} ({t['p5']:.3f} to {t['p95']:.3f})"
                for t in (result["plan_ms"], result["session_ms"])
            )
            print(
                f"{name:26} {result['launches']:3} launches, {result['kernels']:2} kernels, "
                f"{result['streams']} streams: "
                f"plan {ours}, ONNX Runtime {theirs}, ratio {result['ratio']:.3f}, "
                f"open {result['plan_open_s']:.3f} against {result['session_open_s']:.3f} s, "
                f"{'bit-exact' if result['bit_exact'] else 'DIFFERENT'}"
            )
    if options.json:
        options.json.write_text(json.dumps({"cores": len(cores), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
