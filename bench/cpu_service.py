"""Throughput of four callers of a CPU plan and of an ONNX Runtime session, and the memory of four loads of each.

Usage: ``python -m bench.cpu_service [--markdown] [--seconds 9] [--model TEXT] [--folder PATH]``. Writes
bench/results/cpu/service.json, or prints its table with --markdown. Models as in `bench.cpu_overhead`; about four
minutes if its --folder has them.

Throughput: four threads call at the same time, in half-second windows that alternate between a context for each thread,
one executable for all, and one session of default options for all. The goal is met if the whole 95 % interval of the
median ratio to the session is at least 1. Memory: the growth of a process that loads four times and runs each once, in
resident pages, including those of the plan's file.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.clocks import spread
from bench.cpu_overhead import CASES, median_interval, opened_session, prepared

RESULTS = Path(__file__).parent / "results" / "cpu" / "service.json"
CALLERS = 4
WINDOW_S = 0.5
LOADS = {"plan": 4, "session": 4, "one plan": 1, "one session": 1}


def throughput(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Calls per second of threads that each repeat one of ``calls``."""
    end = time.perf_counter() + seconds
    counts = [0] * len(calls)

    def repeat(index: int) -> None:
        while time.perf_counter() < end:
            calls[index]()
            counts[index] += 1

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(calls))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def concurrent(model: Path, plan: Path, seconds: float) -> dict[str, Any]:
    """Calls per second of four threads in each way, and the ratios to the session."""
    from nimblert import golden, load

    session = opened_session(model)
    with load(plan) as executable:
        inputs = golden.draw_inputs(executable.program, 0)
        contexts = [executable.context() for _ in range(CALLERS)]
        ways: dict[str, list[Callable[[], object]]] = {
            "contexts": [partial(context.run, inputs) for context in contexts],
            "executable": [partial(executable.run, inputs)] * CALLERS,
            "session": [partial(session.run, None, inputs)] * CALLERS,
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for calls in ways.values():
            throughput(calls, WINDOW_S / 2)
        for turn in range(max(3, round(seconds / WINDOW_S / len(ways)))):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                found[way].append(throughput(ways[way], WINDOW_S))
    ratios = {way: np.divide(found[way], found["session"]) for way in ("contexts", "executable")}
    return {
        "calls_per_s": {way: spread(rates) for way, rates in found.items()},
        "ratio": {way: {**spread(values), "interval": median_interval(values)} for way, values in ratios.items()},
    }


def resident_mib(kind: str, count: int, model: Path, plan: Path) -> float:
    """Growth of this process by ``count`` plans or sessions that are loaded and run once."""
    from nimblert import golden, load
    from nimblert.check.verify import read_plan
    from nimblert.cpu import backend as cpu
    from nimblert.cpu.onnx_session import onnxruntime

    assert onnxruntime()
    assert cpu  # imported before, like ONNX Runtime: their code does not count
    inputs = golden.draw_inputs(read_plan(plan).programs[0], 0)
    gc.collect()
    before = _resident_kib()
    kept: list[object] = []
    for _ in range(count):
        if kind == "plan":
            executable = load(plan)
            executable.run(inputs)
            kept.append(executable)
        else:
            session = opened_session(model)
            session.run(None, inputs)
            kept.append(session)
    gc.collect()
    return round((_resident_kib() - before) / 1024, 1)


def _resident_kib() -> int:
    found = re.search(r"Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1])


def measure(case: str, folder: Path, seconds: float) -> dict[str, Any]:
    """One model."""
    command = [sys.executable, "-m", "bench.cpu_service", "--seconds", str(seconds), "--child"]
    row: dict[str, Any] = {}
    for what in ("concurrent", *LOADS):
        done = subprocess.run([*command, what, *prepared(case, folder)], stdout=subprocess.PIPE, check=True)
        row[what] = json.loads(done.stdout)
    return row


def markdown(results: Mapping[str, Any]) -> str:
    """The table of docs/measured.md."""
    lines = [
        "| model | contexts / session, calls a second | one executable | four loads / sessions, MiB | one, MiB |",
        "|---|---|---|---|---|",
    ]
    for case, row in results["models"].items():
        rates = {way: values["median"] for way, values in row["concurrent"]["calls_per_s"].items()}
        ratio = {way: values["median"] for way, values in row["concurrent"]["ratio"].items()}
        lines.append(
            f"| {case} | {rates['contexts']:.1f} / {rates['session']:.1f} ({ratio['contexts']:.2f})"
            f" | {rates['executable']:.1f} ({ratio['executable']:.2f})"
            f" | {row['plan']:.0f} / {row['session']:.0f} | {row['one plan']:.0f} / {row['one session']:.0f} |"
        )
    return "\n".join([*lines, "", f"{verdict(results['models'])} {environment.provenance(dict(results))}"])


def verdict(models: Mapping[str, Any]) -> str:
    """Whether the goals are met: throughput by the intervals of the median ratios."""
    ends = {
        f"{case}, {way}": values["interval"]
        for case, row in models.items()
        for way, values in row["concurrent"]["ratio"].items()
    }
    missed = [name for name, (_, most) in ends.items() if most < 1]
    unclear = [name for name, (least, most) in ends.items() if least < 1 <= most]
    larger = [case for case, row in models.items() if row["plan"] >= row["session"]]
    found = [f"{what} by {'; '.join(rows)}" for what, rows in (("missed", missed), ("undecided", unclear)) if rows]
    return (
        f"At least the session's throughput: {', '.join(found) or 'met by all'}. "
        f"Four loads below four sessions: {f'missed by {larger}' if larger else 'met by all'}."
    )


def main() -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--seconds", type=float, default=9, help="of calls for each model")
    parser.add_argument("--model", default="", metavar="TEXT", help="measure models whose names contain TEXT")
    parser.add_argument("--folder", type=Path, help="models and plans; existing ones are used")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "MODEL", "PLAN"), help="measure here and print JSON")
    options = parser.parse_args()
    if options.markdown:
        print(markdown(environment.read(RESULTS)))
    elif options.child:
        what, model, plan = options.child
        if what == "concurrent":
            print(json.dumps(concurrent(Path(model), Path(plan), options.seconds)))
        else:
            print(json.dumps(resident_mib(what.removeprefix("one "), LOADS[what], Path(model), Path(plan))))
    else:
        with tempfile.TemporaryDirectory() as folder:
            _measure_all([case for case in CASES if options.model in case], options, options.folder or Path(folder))
        print(markdown(environment.read(RESULTS)))


def _measure_all(cases: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
    """Write the figures of each model as soon as they are measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        prepared(case, folder)
    kept = environment.read(RESULTS) if options.model and RESULTS.exists() else {"models": {}}
    models, named = kept["models"], kept.get("commits", {})
    commits = {case: named.get(case) or kept["environment"]["commit"] for case in models}
    for case in cases:
        models[case], commits[case] = measure(case, folder, options.seconds), environment.commit()
        environment.write(RESULTS, {"models": models, "commits": commits})


if __name__ == "__main__":
    main()
