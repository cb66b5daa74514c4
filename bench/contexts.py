"""Many threads on a few contexts of one plan: outputs, memory, and throughput beside processes and beside two devices.

Usage: ``python -m bench.contexts PLAN [--threads 32] [--contexts 8] [--seconds 120] [--devices 0,1] [--json FILE]``,
for any plan on its target.

The threads take turns at the contexts; every output is compared with the bytes that its input gave alone. Memory is
looked at every second; it grows by the eight bytes that each run's latency takes. Beside it, for a sixth of the time
each: 1, 2, 4 and 8 processes (``--processes``) that have the machine to themselves and run one thread each, the best of
which is what the contexts are compared with; and with ``--devices``, threads and contexts on the first device and on
all of them, whose throughputs make the ratio. The exit status is 1 if any output was wrong.
"""

import argparse
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

import nimblert
from bench.memory import Held, grown, held
from nimblec.measure import measure, taking_turns
from nimblert import container, golden
from nimblert.context import Context

INPUTS = 8
WARM_UP_S = 1.0
SHARE = 6
"""Each of the other measurements takes so small a part of the time."""
LOOK_S = 1.0


class Checked:
    """Calls of a plan's main entry on different inputs, each output compared with what it was alone."""

    def __init__(self, context: Context) -> None:
        self._inputs = [golden.draw_inputs(context.program, seed) for seed in range(INPUTS)]
        self._expected = [context.run(arrays) for arrays in self._inputs]
        self._next = 0
        self.wrong = 0

    def call(self, context: Context) -> None:
        """One call on the next input."""
        self._next = index = (self._next + 1) % INPUTS  # whichever it is where threads meet
        found = context.run(self._inputs[index])
        if not all(np.array_equal(found[name], array) for name, array in self._expected[index].items()):
            self.wrong += 1


class Watch:
    """Looks at memory every second while the block runs."""

    def __init__(self, plan: Path) -> None:
        self._plan = container.read(plan)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looks: list[Held] = []

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.looks.append(held(self._plan))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def facts(self) -> dict[str, Any]:
        """How memory was when warm, and how it grew."""
        warm = self.looks[len(self.looks) // 10 :]
        return {"begin": warm[0], "grown": grown(warm[0], warm[-1])} if warm else {}


def threads(plan: Path, count: int, contexts: int, seconds: float, devices: Sequence[int]) -> dict[str, Any]:
    """So many threads on so many contexts of each device."""
    models = [nimblert.load(plan, device=device) for device in devices]
    checks = [Checked(model) for model in models]
    calls = []
    for model, check in zip(models, checks, strict=True):
        once = taking_turns([model, *(model.context() for _ in range(contexts - 1))], check.call)
        calls += [once] * count
    with Watch(plan) as watch:
        measured = measure(calls, warm_up=WARM_UP_S, duration=seconds)
    for model in models:
        model.close()
    return {
        "devices": list(devices),
        "threads": count,
        "contexts": contexts,
        "seconds": round(measured.seconds, 3),
        "runs": measured.latencies.size,
        "wrong": sum(check.wrong for check in checks),
        "throughput": round(measured.throughput, 1),
        "latency_ms": {name: round(value * 1000, 3) for name, value in measured.summary().items()},
        "memory": watch.facts(),
    }


def _process(plan: Path, seconds: float, begin: Any, results: Any) -> None:
    """Run the plan in one thread when all processes are ready: (runs a second, wrong outputs)."""
    with nimblert.load(plan) as model:
        check = Checked(model)
        check.call(model)
        begin.wait()
        measured = measure([lambda: check.call(model)], warm_up=WARM_UP_S, duration=seconds)
    results.put((measured.throughput, check.wrong))


def processes(plan: Path, count: int, seconds: float) -> dict[str, Any]:
    """So many processes at the same time."""
    spawning = multiprocessing.get_context("spawn")
    begin, results = spawning.Barrier(count), spawning.Queue()
    started = [spawning.Process(target=_process, args=(plan, seconds, begin, results)) for _ in range(count)]
    for process in started:
        process.start()
    found = [results.get(timeout=600) for _ in started]
    for process in started:
        process.join()
    return {
        "processes": count,
        "throughput": round(sum(throughput for throughput, _ in found), 1),
        "wrong": sum(wrong for _, wrong in found),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if any output was wrong."""
    parser = argparse.ArgumentParser(description="Many threads on a few contexts of one plan.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", default="1,2,4,8", help="how many at once, one number after the other; 0: none")
    parser.add_argument("--devices", default="0", help="of a CUDA plan")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    given = parser.parse_args(arguments)
    devices = [int(text) for text in given.devices.split(",")]
    counts = [int(text) for text in given.processes.split(",") if int(text)]
    part = given.seconds / SHARE
    facts: dict[str, Any] = {"plan": given.plan.name, "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    facts["contexts"] = one = threads(given.plan, given.threads, given.contexts, given.seconds, devices[:1])
    facts["processes"] = others = [processes(given.plan, count, part) for count in counts]
    runs = [one, *others]
    if others:
        facts["of_the_best_processes"] = round(one["throughput"] / max(other["throughput"] for other in others), 3)
    if len(devices) > 1:
        pair = [threads(given.plan, given.threads, given.contexts, part, some) for some in (devices[:1], devices)]
        facts["devices"] = pair
        facts["of_one_device"] = round(pair[1]["throughput"] / pair[0]["throughput"], 3)
        runs += pair
    text = json.dumps(facts, indent=2)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 1 if any(run["wrong"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
