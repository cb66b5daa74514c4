"""Measuring: statistics of made-up times, threads that run at once, errors and Ctrl-C in the middle."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nimblec.base.errors import ArgumentError
from nimblec.cli.measure import Measurement, measure, slowest, taking_turns
from nimblert import CommandTime


def measurement(*latencies: float, seconds: float = 1.0) -> Measurement:
    return Measurement(latencies=np.array(latencies), seconds=seconds)


def test_percentiles_lie_between_the_times_around_them() -> None:
    times = np.random.default_rng(0).permutation(np.arange(1001.0))
    expected = {"min": 0, "p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999, "max": 1000}
    assert measurement(*times).summary() == pytest.approx(expected)
    assert measurement(1.0, 2.0).summary()["p50"] == 1.5
    assert set(measurement(3.0).summary().values()) == {3.0}


def test_throughput_counts_the_runs_of_all_threads() -> None:
    assert measurement(1.0, 1.0, 2.0, seconds=2.0).throughput == 1.5


def test_every_run_after_the_warm_up_counts_for_its_time() -> None:
    starts: list[float] = []

    def call() -> None:
        starts.append(time.perf_counter())
        time.sleep(0.01)

    begin = time.perf_counter()
    found = measure([call], warm_up=1.0, duration=0.3)
    counted = [start for start in starts if start >= begin + 1.0]
    assert 0 < found.latencies.size <= len(counted) < len(starts)
    assert found.latencies.min() >= 0.01
    assert found.seconds >= 0.3
    assert found.latencies.sum() <= found.seconds


def test_a_run_longer_than_the_time_counts_once_in_each_thread() -> None:
    found = measure([lambda: time.sleep(0.05)] * 2, warm_up=0.0, duration=0.001)
    assert found.latencies.size == 2


def test_what_a_run_raises_ends_all_threads() -> None:
    runs: list[int] = []

    def failing() -> None:
        runs.append(1)
        if len(runs) == 5:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        measure([failing, lambda: time.sleep(0.001)], warm_up=60.0, duration=60.0)
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("count", "warm_up", "duration", "sentence"),
    [
        (0, 1.0, 1.0, "threads: 0, expected at least 1"),
        (1, -1.0, 1.0, "warm-up: -1.0 seconds, expected a finite number from 0"),
        (1, float("nan"), 1.0, "warm-up: nan seconds, expected a finite number from 0"),
        (1, 1.0, 0.0, "duration: 0.0 seconds, expected a finite number above 0"),
        (1, 1.0, float("inf"), "duration: inf seconds, expected a finite number above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(count: int, warm_up: float, duration: float, sentence: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        measure([lambda: None] * count, warm_up=warm_up, duration=duration)
    assert str(caught.value) == sentence


def test_the_slowest_commands_are_those_of_the_largest_median() -> None:
    def command(index: int, nanoseconds: int) -> CommandTime:
        return CommandTime(
            command=index, kind="launch", op="Add", source=f"add_{index}", stream=0, nanoseconds=nanoseconds
        )

    profiles = [[command(0, fast), command(1, slow)] for fast, slow in [(10, 20), (99, 21), (11, 22)]]
    assert slowest(profiles) == [command(1, 21), command(0, 11)]


def test_threads_take_turns_at_items() -> None:
    busy: set[str] = set()
    used: set[str] = set()
    lock = threading.Lock()

    def use(item: str) -> None:
        with lock:
            assert item not in busy
            busy.add(item)
            used.add(item)
        time.sleep(0.001)
        with lock:
            busy.remove(item)

    once = taking_turns(["a", "b"], use)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: once(), range(60)))
    assert used == {"a", "b"}
