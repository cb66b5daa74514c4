"""The cost of running node by node on the CPU: a plan against a whole-model ONNX Runtime session.

Usage: ``python -m bench.cpu_overhead [--markdown] [--repeats 200] [--setting NAME]``. Writes
bench/results/cpu/overhead.json, or prints its table with --markdown. --setting measures one setting and keeps the
others in the file: on a shared machine, each can wait for a quiet minute.

Models come from tests/support/families in their full width with random weights, batch 1. A call of the plan
(`nimblert.load(plan).run`) and one of the session take turns on the same arrays, so that load on the machine
affects both alike; the results must be equal bit for bit. Each setting has a process of its own: one core; all
cores with default options; all cores after `nimblert.onnx_session.share_thread_pool()`, as `nimblec run` does. ONNX
Runtime allows no session of default options beside a shared pool, so the table compares the last setting with the
session of the one before.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.clocks import spread

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))  # the families

RESULTS = Path(__file__).parent / "results" / "cpu" / "overhead.json"

CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "resnet18 64 px": ("resnet", "ResNet", (1, 3, 64, 64)),
    "resnet18 128 px": ("resnet", "ResNet", (1, 3, 128, 128)),
    "mobilenet-v2 128 px": ("mobilenet", "MobileNet", (1, 3, 128, 128)),
    "inception-like 96 px": ("inception", "Inception", (1, 3, 96, 96)),
    "unet 64 px": ("unet", "UNet", (1, 3, 64, 64)),
    "bert, 2 layers, 16 tokens": ("bert", "", ()),
}
DEFAULT, ASKED = "all cores", "all cores, one pool"
SETTINGS: dict[str, tuple[int | None, bool]] = {"one core": (1, False), DEFAULT: (None, False), ASKED: (None, True)}
"""Cores (None: all that there are), and whether all sessions share one thread pool."""


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


def measure(path: Path, repeats: int, *, threads: int, shared: bool) -> dict[str, Any]:
    """One model: the plan's and the session's times, and what the plan is made of."""
    from cpu_plans import plan_file

    from nimblert import golden, load
    from nimblert.onnx_session import onnxruntime

    plan = plan_file(path, streams=1)
    program = plan.programs[0]
    inputs = golden.draw_inputs(program, 0)
    begin = time.perf_counter()
    loaded = load(plan)
    plan_open = time.perf_counter() - begin
    begin = time.perf_counter()
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.use_per_session_threads = not shared
    session = onnxruntime().InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    session_open = time.perf_counter() - begin
    times = take_turns([lambda: loaded.run(inputs), lambda: session.run(None, inputs)], repeats)
    equal = all(map(np.array_equal, loaded.run(inputs).values(), session.run(None, inputs)))
    loaded.close()
    return {
        "launches": len(program.ops),
        "kernels": len(plan.kernels),
        "plan_ms": spread(times[:, 0]),
        "session_ms": spread(times[:, 1]),
        "plan_open_s": round(plan_open, 4),
        "session_open_s": round(session_open, 4),
        "bit_exact": equal,
    }


def measure_setting(name: str, repeats: int) -> dict[str, Any]:
    """Every case under one setting, which holds for the whole process."""
    from nimblert import onnx_session

    cores, shared = SETTINGS[name]
    if shared:
        onnx_session.share_thread_pool()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, source in CASES.items():
            path = Path(folder, "model.onnx")
            export(*source, path)
            results[case] = measure(path, repeats, threads=cores or 0, shared=shared)
    return results


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/measured.md: medians, and their ratios to the session that asks for nothing either."""
    settings = results["settings"]
    lines = ["| model | launches | one core: plan / session, ms | all cores: plan / session, ms | one pool: plan, ms |"]
    lines.append("|---" * 5 + "|")
    for case in CASES:
        one, default, asked = (settings[name][case] for name in SETTINGS)
        theirs = default["session_ms"]["median"]
        cells = [_pair(row["plan_ms"]["median"], row["session_ms"]["median"]) for row in (one, default)]
        ours = asked["plan_ms"]["median"]
        lines.append(f"| {case} | {one['launches']} | {cells[0]} | {cells[1]} | {ours:.2f} ({ours / theirs:.2f}) |")
    exact = all(row["bit_exact"] for setting in settings.values() for row in setting.values())
    below = environment.provenance(results)
    return "\n".join([*lines, "", f"All results bit-exact: {'yes' if exact else 'NO'}. {below}"])


def _pair(ours: float, theirs: float) -> str:
    return f"{ours:.2f} / {theirs:.2f} ({ours / theirs:.2f})"


def main() -> None:
    """Measure, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="measure this one; repeatable")
    parser.add_argument("--print", metavar="SETTING", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.markdown:
        print(markdown(environment.read(RESULTS)))
    elif options.print:
        print(json.dumps(measure_setting(options.print, options.repeats)))
    else:
        kept = environment.read(RESULTS) if options.setting and RESULTS.exists() else {"settings": {}}
        settings, commits = kept["settings"], kept.get("commits", {})
        command = [sys.executable, "-m", "bench.cpu_overhead", "--repeats", str(options.repeats), "--print"]
        for name in options.setting or SETTINGS:
            done = subprocess.run([*command, name], stdout=subprocess.PIPE, check=True)
            settings[name], commits[name] = json.loads(done.stdout), environment.commit()
            environment.write(RESULTS, {"settings": settings, "commits": commits})
        if settings.keys() == SETTINGS.keys():
            print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main()
