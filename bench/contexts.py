"""Many threads on a few contexts of one plan: outputs, memory, and throughput compared with processes and devices.

Usage: ``python -m bench.contexts MODEL_OR_PLAN [--threads 32] [--contexts 8] [--seconds 120] [--devices 0,1] [--json
FILE]``, for any plan file on its target, or for a model named package.module:callable, which is compiled first.

The threads take turns at the contexts; every output must equal, bit for bit, that of its input run alone. Memory is
sampled every second; it may grow by the recorded latencies. The other measurements take a sixth of the time each: 1, 2,
4 and 8 processes (``--processes``) of one thread each, alone on the machine, the best of which the contexts are
compared with; and with ``--devices``, threads and contexts on the first device and on all of them, whose throughputs
are compared: all in one process, and with a process for each device. The exit status is 1 if any output was wrong, or
if memory grew.

The expected total is 1.7 times the seconds plus a minute (with two devices, 2.3 times plus two minutes), and the
compilation: on H200s, ``python -m bench.contexts bench.models.resnet50:fp16 --devices 0,1 --json
bench/results/gpu/contexts.json`` takes about seven minutes.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

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

    def __init__(self, context: nimblert.Executable) -> None:
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


def shared(model: nimblert.Executable, contexts: int, check: Checked) -> Callable[[], object]:
    """A checked call for threads that take turns at so many contexts, the executable's own among them."""
    return taking_turns([model, *(model.context() for _ in range(contexts - 1))], check.call)


class Watch:
    """Samples memory every second while the block runs."""

    def __init__(self, plan: Path, device: int) -> None:
        self._sample = partial(held, read_plan(plan), device)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looks: list[Held] = []

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.looks.append(self._sample())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Memory after the warm-up, and its growth."""
        warm = self.looks[len(self.looks) // 10 :]
        return {"begin": warm[0], "grown": grown(warm[0], warm[-1])} if warm else {}


def is_flat(run: Mapping[str, Any]) -> bool:
    """Whether memory stayed flat in a run of threads, apart from the latencies."""
    found = run["memory"].get("grown", {})
    allowed = {"anonymous": SLACK_NBYTES + LATENCY_NBYTES * run["runs"], "device": SLACK_NBYTES}
    return all(growth <= allowed.get(name, 0) for name, growth in found.items())


def threads(plan: Path, count: int, contexts: int, seconds: float, devices: Sequence[int]) -> dict[str, Any]:
    """``count`` threads on ``contexts`` contexts of each device."""
    models = [nimblert.load(plan, device=device) for device in devices]
    checks = [Checked(model) for model in models]
    calls = []
    for model, check in zip(models, checks, strict=True):
        calls += [shared(model, contexts, check)] * count
    with Watch(plan, devices[0]) as watch:
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


def _process(
    plan: Path, device: int, count: int, contexts: int, seconds: float, begin: "threading.Barrier"
) -> tuple[float, int]:
    """Run the plan in threads once all processes are ready; returns runs per second and wrong outputs."""
    with nimblert.load(plan, device=device) as model:
        check = Checked(model)
        once = shared(model, contexts, check)
        once()
        begin.wait(READY_S)
        measured = measure([once] * count, warm_up=WARM_UP_S, duration=seconds)
    return measured.throughput, check.wrong


def processes(
    plan: Path, devices: Sequence[int], seconds: float, *, count: int = 1, contexts: int = 1
) -> dict[str, Any]:
    """A process for each of the ``devices``, which may repeat, at the same time; in each, threads on contexts."""
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
    """All measurements of the command line."""
    devices = [int(text) for text in options.devices.split(",")]
    part = options.seconds / SHARE
    one = threads(plan, options.threads, options.contexts, options.seconds, devices[:1])
    facts: dict[str, Any] = {"contexts": one}
    counts = [int(text) for text in options.processes.split(",") if int(text)]
    facts["processes"] = [processes(plan, devices[:1] * number, part) for number in counts]
    if facts["processes"]:
        best = max(other["throughput"] for other in facts["processes"])
        facts["of_the_best_processes"] = round(one["throughput"] / best, 3)
    if len(devices) > 1:
        together = partial(threads, plan, options.threads, options.contexts, part)
        apart = partial(processes, plan, seconds=part, count=options.threads, contexts=options.contexts)
        facts["devices"] = {
            "one_process": _beside_one(together, devices),
            "a_process_for_each": _beside_one(apart, devices),
        }
    pairs = [run for way in facts.get("devices", {}).values() for run in way["runs"]]
    runs = [one, *facts["processes"], *pairs]
    return {**facts, "flat": is_flat(one), "wrong": sum(run["wrong"] for run in runs)}


def _beside_one(measured: Callable[[Sequence[int]], dict[str, Any]], devices: Sequence[int]) -> dict[str, Any]:
    """The first device alone and all of them, and the ratio of their throughputs."""
    runs = [measured(some) for some in (devices[:1], devices)]
    return {"runs": runs, "of_one_device": round(runs[1]["throughput"] / runs[0]["throughput"], 3)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if any output was wrong, or if memory grew."""
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
        plan = plan_of(options.plan, Path(folder, "model.plan"), target="cuda", level=options.level)
        facts = {"plan": Path(options.plan).name, "environment": environment.describe(), **compared(plan, options)}
    text = json.dumps(facts, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if facts["flat"] and not facts["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
