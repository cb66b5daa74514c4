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

import nimblec
from nimblec.cpu import timing
from nimblec.cpu.timing import CpuTimer
from nimblec.plan.lean import run_seconds
from nimblert.cpu import onnx_session

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"


def nodes(code: bytes) -> int:
    """The number of nodes in a model."""
    return len(onnx.load_model_from_string(code).graph.node)


def test_launches_are_timed_without_the_session_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session keeps packed copies of its weights: with one of all launches beside, there were two of each."""
    plan = nimblec.compile(DIGITS, target="cpu")
    opened: list[bytes] = []
    open_session = onnx_session.open_session

    def opening(code: bytes, *args: Any) -> object:
        opened.append(code)
        return open_session(code, *args)

    monkeypatch.setattr(onnx_session, "open_session", opening)
    timer = CpuTimer()
    assert len(timer.command_durations(plan).ns) == len(plan.programs[0].commands)
    assert {nodes(code) for code in opened} == {1}
    opened.clear()
    assert timer.duration(plan).ns > 0
    assert {nodes(code) for code in opened} == {len(plan.programs[0].commands)}


@pytest.mark.parametrize(
    ("waited_s", "tries", "is_noisy"), [((0, 0), 1, False), ((0, 9, 9, 9), 2, False), ((), 4, True)]
)
def test_timer_measures_again_while_threads_wait_for_processors(
    waited_s: tuple[int, ...], tries: int, is_noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a plan seemed twice as slow as it was."""
    read = chain(waited_s, count(10, 9))
    samples: list[int] = []
    count_of = timing._count
    monkeypatch.setattr(timing, "_PAUSE_S", 0)
    monkeypatch.setattr(timing, "_waited_ns", lambda: next(read) * 10**9)
    monkeypatch.setattr(timing, "_count", lambda seconds: samples.append(0) or count_of(seconds))
    measured = CpuTimer().duration(nimblec.compile(DIGITS, target="cpu"))
    assert (len(samples), measured.is_noisy) == (tries, is_noisy)


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
