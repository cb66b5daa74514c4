"""Throughput of four callers of a CPU plan and of an ONNX Runtime session, and the memory of four loads of each.

Usage: ``python -m bench.cpu_service [--markdown] [--seconds 9] [--model TEXT] [--folder PATH]``. Writes
bench/results/cpu/service.json, or prints its table with --markdown. Models as in `bench.cpu_overhead`; about four
minutes if its --folder has them.

Throughput: four threads call at the same time, in half-second windows that alternate between a context for each thread,
one executable for all, and one session of default options for all. The goal is met if the whole 95 % interval of the
median ratio to the session is at least 1. Memory: the growth of a process that loads four times and runs each once, in
resident pages, including those of the plan's file.
"""

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
from bench.cpu_overhead import CASES, case_parser, median_interval, opened_session, prepared, verdict
from bench.tables import by_columns

RESULTS = Path(__file__).parent / "results" / "cpu" / "service.json"
CALLERS = 4
WINDOW_S = 0.5
LOADS = {"plan": 4, "session": 4, "one plan": 1, "one session": 1}


def throughput(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return the calls per second of threads that each repeat one of ``calls``."""
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
    """Return the calls per second of four threads in each way, and the ratios to the session."""
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
    """Return the growth of this process by ``count`` plans or sessions that are loaded and run once."""
    from nimblert import golden, load
    from nimblert.check.verify import read_plan
    from nimblert.cpu import backend as cpu
    from nimblert.cpu.onnx_session import onnxruntime

    assert onnxruntime()
    # Imports of either do not count as memory of a load.
    assert cpu
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
    """Return the figures of one model, each from a process of its own."""
    command = [sys.executable, "-m", "bench.cpu_service", "--seconds", str(seconds), "--child"]
    row: dict[str, Any] = {}
    for what in ("concurrent", *LOADS):
        done = subprocess.run([*command, what, *prepared(case, folder)], stdout=subprocess.PIPE, check=True)
        row[what] = json.loads(done.stdout)
    return row


def _median(row: Mapping[str, Any], kind: str, way: str) -> float:
    return float(row["concurrent"][kind][way]["median"])


def _contexts(_: str, row: Mapping[str, Any]) -> str:
    rates = " / ".join(f"{_median(row, 'calls_per_s', way):.1f}" for way in ("contexts", "session"))
    return f"{rates} ({_median(row, 'ratio', 'contexts'):.2f})"


COLUMNS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "model": lambda case, _: case,
    "contexts / session, calls a second": _contexts,
    "one executable": lambda _, row: (
        f"{_median(row, 'calls_per_s', 'executable'):.1f} ({_median(row, 'ratio', 'executable'):.2f})"
    ),
    "four loads / sessions, MiB": lambda _, row: f"{row['plan']:.0f} / {row['session']:.0f}",
    "one, MiB": lambda _, row: f"{row['one plan']:.0f} / {row['one session']:.0f}",
}


def markdown(results: Mapping[str, Any]) -> str:
    """Return the table of docs/measured.md, and whether the goals are met."""
    models = results["models"]
    ratios = ((case, row["concurrent"]["ratio"]) for case, row in models.items())
    intervals = {f"{case}, {way}": found[way]["interval"] for case, found in ratios for way in found}
    larger = [case for case, row in models.items() if row["plan"] >= row["session"]]
    below = (
        f"At least the session's throughput: {verdict(intervals, least=1)} "
        f"Four loads below four sessions: {f'missed by {larger}' if larger else 'met by all'}."
    )
    return "\n".join([*by_columns(COLUMNS, models.items()), "", f"{below} {environment.provenance(dict(results))}"])


def main() -> None:
    """Measure, or print the table of the results; write the figures of each model as soon as they are measured."""
    parser = case_parser(__doc__, seconds=9)
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "MODEL", "PLAN"), help="measure here and print JSON")
    options = parser.parse_args()
    if options.child:
        what, model, plan = options.child[0], *map(Path, options.child[1:])
        if what == "concurrent":
            print(json.dumps(concurrent(model, plan, options.seconds)))
        else:
            print(json.dumps(resident_mib(what.removeprefix("one "), LOADS[what], model, plan)))
        return
    for case in () if options.markdown else [case for case in CASES if options.model in case]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            row = measure(case, folder, options.seconds)
        kept = environment.read(RESULTS) if RESULTS.exists() else {"models": {}, "commits": {}}
        models, commits = kept["models"] | {case: row}, kept["commits"] | {case: environment.commit()}
        environment.write(RESULTS, {"models": models, "commits": commits})
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main()
