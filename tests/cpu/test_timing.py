"""Measuring plans on this CPU."""

import os
import subprocess
import sys
import time
from itertools import chain, count
from pathlib import Path
from typing import Any

import onnx
import pytest
from cpu_plans import floats, write_model

import nimblec
from nimblec.cpu import timing
from nimblec.cpu.timing import CpuTimer
from nimblec.plan.lean import run_seconds
from nimblert.plan import Module, Plan

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"


def nodes(module: Module) -> int:
    """Return the number of nodes in a model."""
    return len(onnx.load_model_from_string(bytes(module.code)).graph.node)


def test_timer_times_nodes_apart_and_schedules_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch takes the time of its nodes, which are timed without the session of all: it packs the weights too."""
    timed: dict[str, list[Plan]] = {"command_durations": [], "duration": []}
    for name, plans in timed.items():
        measure = getattr(CpuTimer, name)

        def noting(self: CpuTimer, plan: Plan, *, measure: Any = measure, plans: list[Plan] = plans) -> object:
            plans.append(plan)
            return measure(self, plan)

        monkeypatch.setattr(CpuTimer, name, noting)
    node = onnx.helper.make_node
    towers = [
        node("Tanh", ["x"], ["a"]),
        node("Exp", ["a"], ["b"]),
        node("Sin", ["x"], ["c"]),
        node("Cos", ["c"], ["d"]),
    ]
    path = tmp_path / "towers.onnx"
    write_model(path, [*towers, node("Add", ["b", "d"], ["y"])], [floats("x", 64)], [floats("y", 64)])
    nimblec.compile(path, target="cpu", plan_cache=None)
    (apart,), joined = timed.values()
    assert set(map(nodes, apart.modules)) == {1}
    assert joined
    assert all(max(map(nodes, plan.modules)) > 1 for plan in joined)


@pytest.mark.parametrize(
    ("waited_s", "tries", "is_noisy"), [((0, 0), 1, False), ((0, 9, 9, 9), 2, False), ((), 4, True)]
)
def test_timer_measures_again_while_threads_wait_for_processors(
    waited_s: tuple[int, ...], tries: int, is_noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a plan seemed twice as slow as it was. A machine that stays busy is not waited for again."""
    plan = nimblec.compile(DIGITS, target="cpu")
    read = chain(waited_s, count(10, 9))
    samples: list[int] = []
    count_of = timing._count
    monkeypatch.setattr(timing, "_PAUSE_S", 0)
    monkeypatch.setattr(timing, "_waited_ns", lambda: next(read) * 10**9)
    monkeypatch.setattr(timing, "_count", lambda seconds: samples.append(0) or count_of(seconds))
    timer = CpuTimer()
    measured = timer.duration(plan)
    assert (len(samples), measured.is_noisy) == (tries, is_noisy)
    timer.duration(plan)
    assert len(samples) == tries + (1 if is_noisy else 4)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux counts it")
def test_timer_sees_that_threads_wait() -> None:
    """Of two threads on one processor, one waits at any time."""
    processors = os.sched_getaffinity(0)
    child = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    own = min(processors)
    with subprocess.Popen([sys.executable, "-c", child, str(own)]) as busy:
        try:
            os.sched_setaffinity(0, {own})
            waited, end = timing._waited_ns(), time.monotonic() + 10
            while timing._waited_ns() - waited < 10_000_000:
                assert time.monotonic() < end
        finally:
            os.sched_setaffinity(0, processors)
            busy.kill()


def test_check_takes_a_plan_without_times_for_slow() -> None:
    """Its time limit would be that of a plan that runs in no time."""
    assert run_seconds(nimblec.compile(DIGITS, target="cpu", reproducible=True)) == 60
    assert 0 < run_seconds(nimblec.compile(DIGITS, target="cpu")) < 1
