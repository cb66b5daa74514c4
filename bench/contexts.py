"""Many threads on a few contexts of one plan: outputs, memory, and throughput compared with processes and devices.

Usage: ``python -m bench.contexts MODEL_OR_PLAN [--threads 32] [--contexts 8] [--seconds 120] [--devices 0,1] [--json
FILE]``, for a plan file, or a model named package.module:callable. Takes 1.7 times the seconds plus a minute; with two
devices, 2.3 times plus two minutes.

Threads take turns at the contexts; every output must equal, bit for bit, that of its input run alone, and memory,
sampled every second, may grow only by the recorded latencies: else the exit status is 1. The throughput is compared
with the best of 1, 2, 4 and 8 ``--processes`` of one thread; with ``--devices``, also that of the first device with all
of them, in one process and in a process for each.
"""

import argparse
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import nimblert
from bench import environment
from bench.compiling import plan_of
from bench.memory import SLACK_NBYTES, Held, grown, held
from nimblec.cli.measure import measure, taking_turns
from nimblert import golden
from nimblert.check.verify import read_plan
from nimblert.context import Context

INPUTS = 8
WARM_UP_S = 1.0
SHARE = 6
"""Each of the other measurements takes this fraction of the time."""
LOOK_S = 1.0
READY_S = 120.0
"""Limit until all processes have loaded the plan."""
LATENCY_NBYTES = 16
"""Memory for a run's latency: eight bytes in an array that is copied when it grows."""


class Checked:
    """Calls of a plan's main entry on different inputs, each output compared with that of the input run alone."""

    def __init__(self, model: nimblert.Executable, contexts: int) -> None:
        """Make ``contexts`` contexts for threads to share, the executable's own among them."""
        self._inputs = [golden.draw_inputs(model.program, seed) for seed in range(INPUTS)]
        self._expected = [model.run(arrays) for arrays in self._inputs]
        self._next = 0
        self.wrong = 0
        self.once = taking_turns([model, *(model.context() for _ in range(contexts - 1))], self.call)
        """A call by any thread, on a context that no other thread uses."""

    def call(self, context: Context) -> None:
        """Make one call on the next input; threads that meet may take the same."""
        self._next = index = (self._next + 1) % INPUTS
        found = context.run(self._inputs[index])
        if not all(np.array_equal(found[name], array) for name, array in self._expected[index].items()):
            self.wrong += 1


@contextmanager
def watched(plan: Path, device: int) -> Iterator[list[Held]]:
    """Sample memory every second while the block runs."""
    sample, looks, ended = partial(held, read_plan(plan), device), list[Held](), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            looks.append(sample())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        ended.set()
        thread.join()


def is_flat(run: Mapping[str, Any]) -> bool:
    """Return whether memory stayed flat in a run of threads, apart from the latencies."""
    found = run["memory"].get("grown", {})
    allowed = {"anonymous": SLACK_NBYTES + LATENCY_NBYTES * run["runs"], "device": SLACK_NBYTES}
    return all(growth <= allowed.get(name, 0) for name, growth in found.items())


def threads(plan: Path, count: int, contexts: int, seconds: float, devices: Sequence[int]) -> dict[str, Any]:
    """Measure ``count`` threads on ``contexts`` contexts of each device."""
    with ExitStack() as opened:
        models = [opened.enter_context(nimblert.load(plan, device=device)) for device in devices]
        checks = [Checked(model, contexts) for model in models]
        calls = [check.once for check in checks for _ in range(count)]
        with watched(plan, devices[0]) as looks:
            measured = measure(calls, warm_up=WARM_UP_S, duration=seconds)
    warm = looks[len(looks) // 10 :]
    return {
        "devices": list(devices),
        "threads": count,
        "contexts": contexts,
        "seconds": round(measured.seconds, 3),
        "runs": measured.latencies.size,
        "wrong": sum(check.wrong for check in checks),
        "throughput": round(measured.throughput, 1),
        "latency_ms": {name: round(value * 1000, 3) for name, value in measured.summary().items()},
        "memory": {"begin": warm[0], "grown": grown(warm[0], warm[-1])} if warm else {},
    }


def _process(
    plan: Path, device: int, count: int, contexts: int, seconds: float, begin: "threading.Barrier"
) -> tuple[float, int]:
    """Run the plan in threads once all processes are ready; return runs per second and wrong outputs."""
    with nimblert.load(plan, device=device) as model:
        check = Checked(model, contexts)
        check.once()
        begin.wait(READY_S)
        measured = measure([check.once] * count, warm_up=WARM_UP_S, duration=seconds)
    return measured.throughput, check.wrong


def processes(
    plan: Path, devices: Sequence[int], seconds: float, *, count: int = 1, contexts: int = 1
) -> dict[str, Any]:
    """Measure a process for each of the ``devices``, which may repeat, at the same time; in each, threads."""
    spawning = multiprocessing.get_context("spawn")
    with spawning.Manager() as manager, ProcessPoolExecutor(len(devices), spawning) as pool:
        begin = manager.Barrier(len(devices))
        running = [pool.submit(_process, plan, device, count, contexts, seconds, begin) for device in devices]
        found = [future.result() for future in running]
    return {
        "processes": len(devices),
        "devices": list(devices),
        "threads": count,
        "contexts": contexts,
        "throughput": round(sum(throughput for throughput, _ in found), 1),
        "wrong": sum(wrong for _, wrong in found),
    }


def compared(plan: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements of the command line."""
    devices, counts = ([int(n) for n in text.split(",") if n] for text in (options.devices, options.processes))
    part = options.seconds / SHARE
    one = threads(plan, options.threads, options.contexts, options.seconds, devices[:1])
    others = [processes(plan, devices[:1] * number, part) for number in counts if number]
    facts: dict[str, Any] = {"contexts": one, "processes": others}
    if others:
        best = max(other["throughput"] for other in others)
        facts["of_the_best_processes"] = round(one["throughput"] / best, 3)
    runs = [one, *others]
    if len(devices) > 1:
        together = partial(threads, plan, options.threads, options.contexts, part)
        apart = partial(processes, plan, seconds=part, count=options.threads, contexts=options.contexts)
        facts["devices"] = {}
        for way, measured in (("one_process", together), ("a_process_for_each", apart)):
            pair = [measured(some) for some in (devices[:1], devices)]
            ratio = round(pair[1]["throughput"] / pair[0]["throughput"], 3)
            facts["devices"][way] = {"runs": pair, "of_one_device": ratio}
            runs += pair
    return {**facts, "flat": is_flat(one), "wrong": sum(run["wrong"] for run in runs)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 if any output was wrong, or if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", metavar="MODEL_OR_PLAN")
    parser.add_argument("--level", type=int, default=2, help="of a model")
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", default="1,2,4,8", help="numbers of processes to try, in order; 0: none")
    parser.add_argument("--devices", default="0", help="of a CUDA plan")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(options.plan, Path(folder, "model.plan"), level=options.level)
        facts = {"plan": Path(options.plan).name, "environment": environment.describe(), **compared(plan, options)}
    environment.report(facts, options.json)
    return 0 if facts["flat"] and not facts["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
