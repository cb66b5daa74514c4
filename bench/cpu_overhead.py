"""The time of a CPU plan's call, compared with a whole-model ONNX Runtime session of default options.

Usage: ``python -m bench.cpu_overhead [--markdown] [--seconds 6] [--model TEXT] [--setting NAME] [--folder PATH]``.
Writes bench/results/cpu/overhead.json, or prints its table with --markdown. --model and --setting measure a part and
keep the rest of the file: on a shared machine, each part can wait for a quiet minute. Models and plans are written to
--folder, where `bench.cpu_service` finds them as well: about two minutes for all, and two more to measure them.

The first models come from tests/support/families at full width, the others from bench/models, which need torchvision,
transformers and timm; random weights, batch 1. Calls of the plan (`nimblert.load(plan).run`) and of the session
alternate on the same arrays, so that load on the machine affects both alike; the results must be equal bit for bit if
the session has one thread. Each setting, one core or all of them, has a process of its own, without PyTorch. The goal
is met if the whole 95 % interval of the median ratio is at most 1.03.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.clocks import spread
from bench.tables import by_columns
from nimblec.plan import encoder

RESULTS = Path(__file__).parent / "results" / "cpu" / "overhead.json"

CASES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "resnet18 64 px": ("families.resnet", "ResNet", (1, 3, 64, 64)),
    "resnet18 128 px": ("families.resnet", "ResNet", (1, 3, 128, 128)),
    "mobilenet-v2 128 px": ("families.mobilenet", "MobileNet", (1, 3, 128, 128)),
    "inception-like 96 px": ("families.inception", "Inception", (1, 3, 96, 96)),
    "unet 64 px": ("families.unet", "UNet", (1, 3, 64, 64)),
    "bert, 2 layers, 16 tokens": ("families.bert", "small", ()),
    "swin-t 224 px": ("bench.models.swin_t", "fp32", ()),
    "t5 decoder, 2 layers, 1 token": ("bench.models.t5_decoder", "fp32", ()),
    "distilbert, 128 tokens": ("bench.models.distilbert", "fp32", ()),
    "mobilevit-s 256 px": ("bench.models.mobilevit_s", "fp32", ()),
}
"""Module, factory of the model, and shape of its input; without a shape, the factory returns inputs as well."""

SETTINGS: dict[str, int | None] = {"one core": 1, "all cores": None}
"""Number of cores; None: all of them."""

MOST_RATIO = 1.03
"""The goal for the time of a plan's call over that of the session's."""

_GROUP_S = 0.05
"""Approximate time of consecutive calls of one kind."""
_LEAST_ROUNDS = 10


def prepared(case: str, folder: Path) -> tuple[Path, Path]:
    """Return the ONNX file of a case and its plan on one stream, written to the folder unless they exist."""
    from cpu_plans import plan_file

    stem = case.replace(",", "").replace(" ", "-")
    model, plan = folder / f"{stem}.onnx", folder / f"{stem}.plan"
    if not plan.exists():
        _export(*CASES[case], model)
        encoder.write(plan_file(model, streams=1), plan)
    return model, plan


def _export(module: str, maker: str, shape: tuple[int, ...], path: Path) -> None:
    import torch

    torch.manual_seed(0)
    made = getattr(importlib.import_module(module), maker)()
    model, args = (made, (torch.randn(shape),)) if shape else made
    ways: dict[str, Any] = {"external_data": False, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), args, path, **({"dynamo": False} if module.startswith("families.") else ways))


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each of ``count`` consecutive calls, after two warm-ups."""
    times = []
    for call in range(-2, count):
        begin = time.perf_counter()
        run()
        if call >= 0:
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def compare(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Alternate two calls: milliseconds of each, and the ratios of neighbouring groups of calls."""
    for run in (ours, theirs):
        timed(run, 3)
    group = max(1, min(10, int(_GROUP_S * 1e3 / np.median(timed(theirs, 3)))))
    rounds: list[list[list[float]]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < _LEAST_ROUNDS:
        order = (ours, theirs) if len(rounds) % 2 else (theirs, ours)
        found = {run: timed(run, group) for run in order}
        rounds.append([found[ours], found[theirs]])
    times = np.array(rounds)  # round, ours or theirs, call
    ratios = np.divide(*np.median(times, axis=2).T)
    both = {name: spread(times[:, i].ravel()) for i, name in enumerate(("plan_ms", "session_ms"))}
    ratio = {**spread(ratios), "interval": median_interval(ratios)}
    return {**both, "ratio": ratio, "least_ms": times.min(axis=(0, 2)).round(4).tolist(), "rounds": len(rounds)}


def median_interval(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return the 95 % confidence interval of the median, by the sign test."""
    ordered, reach = np.sort(values), 0.98 * len(values) ** 0.5
    first = max(0, int(len(values) / 2 - reach))
    return [round(float(ordered[first]), 4), round(float(ordered[len(values) - 1 - first]), 4)]


def measure(model: Path, plan: Path, seconds: float, *, threads: int) -> dict[str, Any]:
    """Return the times of a model's plan and session, and the plan's number of launches."""
    from nimblert import golden, load
    from nimblert.plan import Launch

    begin = time.perf_counter()
    with load(plan) as loaded:
        opened = {"plan_open_s": round(time.perf_counter() - begin, 4)}
        inputs = golden.draw_inputs(loaded.program, 0)
        begin = time.perf_counter()
        session = opened_session(model, threads=threads)
        opened["session_open_s"] = round(time.perf_counter() - begin, 4)
        compared = compare(lambda: loaded.run(inputs), lambda: session.run(None, inputs), seconds)
        equal = all(map(np.array_equal, loaded.run(inputs).values(), session.run(None, inputs)))
        launches = sum(isinstance(command, Launch) for command in loaded.program.commands)
        return {**compared, **opened, "launches": launches, "bit_exact": equal}


def opened_session(model: Path, *, threads: int = 0) -> Any:
    """Return a silent session with default options but for its number of threads (0: one for each core)."""
    from nimblert.cpu.onnx_session import onnxruntime

    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime().InferenceSession(os.fspath(model), options, providers=["CPUExecutionProvider"])


def measure_setting(name: str, cases: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of some cases under one setting, which applies to the whole process from now on."""
    cores = SETTINGS[name]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    return {case: measure(*prepared(case, folder), seconds, threads=cores or 0) for case in cases}


def markdown(results: Mapping[str, Any]) -> str:
    """Return the table of docs/measured.md: medians in milliseconds, their ratio, and the ratio of the least."""
    settings = results["settings"]
    rows = [
        (case, *(settings[name][case] for name in SETTINGS))
        for case in CASES
        if all(case in settings.get(name, {}) for name in SETTINGS)
    ]
    columns: dict[str, Callable[..., str]] = {
        "model": lambda case, *_: case,
        "launches": lambda _, one, __: str(one["launches"]),
        "one core: plan / session, ms": lambda _, one, __: _cell(one),
        "all cores: plan / session, ms": lambda _, __, all_: _cell(all_),
    }
    exact = all(figures["bit_exact"] for _, *both in rows for figures in both)
    below = [
        "In brackets: the ratio of the medians of neighbouring calls, and that of the fastest of all.",
        "All results are equal bit for bit." if exact else "NOT all results are equal bit for bit.",
        f"At most {MOST_RATIO} times the session's call: "
        + verdict(
            {f"{case}, {name}": row["ratio"]["interval"] for name in settings for case, row in settings[name].items()},
            most=MOST_RATIO,
        ),
        environment.provenance(dict(results)),
    ]
    return "\n".join([*by_columns(columns, rows), "", " ".join(below)])


def verdict(intervals: Mapping[str, Sequence[float]], *, least: float = 0.0, most: float = np.inf) -> str:
    """Return which intervals miss the range from ``least`` to ``most``, and which lie in it only in part."""
    missed = [name for name, (low, high) in intervals.items() if low > most or high < least]
    within = [name for name, (low, high) in intervals.items() if least <= low and high <= most]
    unclear = [name for name in intervals if name not in {*missed, *within}]
    found = [f"{what} by {'; '.join(rows)}" for what, rows in (("missed", missed), ("undecided", unclear)) if rows]
    return f"{', '.join(found) or 'met by all'}."


def _cell(row: Mapping[str, Any]) -> str:
    ours, theirs = (row[name]["median"] for name in ("plan_ms", "session_ms"))
    least = row["least_ms"]
    return f"{ours:.2f} / {theirs:.2f} ({row['ratio']['median']:.2f}, {least[0] / least[1]:.2f})"


def case_parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return the common command line of the benchmarks of `CASES`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--markdown", action="store_true")
    made.add_argument("--seconds", type=float, default=seconds, help="of calls for each model")
    made.add_argument("--model", default="", metavar="TEXT", help="measure models whose names contain TEXT")
    made.add_argument("--folder", type=Path, help="models and plans; existing ones are used")
    return made


def main() -> None:
    """Measure, or print the table of the results; write the figures of each setting as soon as they are measured."""
    parser = case_parser(__doc__, seconds=6)
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="measure this setting; repeatable")
    parser.add_argument("--print", metavar="SETTING", help="measure in this process and print JSON")
    options = parser.parse_args()
    cases = [case for case in CASES if options.model in case]
    if options.print:
        print(json.dumps(measure_setting(options.print, cases, options.folder, options.seconds)))
        return
    for name in () if options.markdown else options.setting or SETTINGS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            for case in cases:
                prepared(case, folder)
            command = [sys.executable, "-m", "bench.cpu_overhead", "--seconds", str(options.seconds)]
            command += ["--folder", str(folder), "--model", options.model, "--print", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        kept = environment.read(RESULTS) if RESULTS.exists() else {"settings": {}, "commits": {}}
        kept["settings"][name] = kept["settings"].get(name, {}) | json.loads(done.stdout.splitlines()[-1])
        kept["commits"] |= {f"{case}, {name}": environment.commit() for case in cases}
        environment.write(RESULTS, {"settings": kept["settings"], "commits": kept["commits"]})
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main()
