"""Quiet and noisy samples: noisy ones are repeated."""

from collections.abc import Iterator, Sequence

import pytest

from bench import clocks
from bench.clocks import quietest

QUIET = [100.0, 101.0, 102.0] * 40
SPREAD = [100.0] * 60 + [120.0] * 60


def sampled(tries: Iterator[dict[str, Sequence[float]]]) -> dict[str, object]:
    return quietest({"kernels": lambda: next(tries)})


def test_quietest_takes_a_quiet_try() -> None:
    figures = sampled(iter([{"kernels_us": QUIET}]))
    assert figures == {"kernels_us": {"p5": 100.0, "median": 101.0, "p95": 102.0}, "noisy": []}


def test_quietest_repeats_a_noisy_try() -> None:
    figures = sampled(iter([{"kernels_us": SPREAD}, {"kernels_us": QUIET}]))
    assert figures["kernels_us"] == clocks.spread(QUIET)
    assert figures["noisy"] == []


def test_quietest_marks_the_best_of_three_noisy_tries() -> None:
    wider = [100.0] * 60 + [200.0] * 60
    tries = [{"call_us": wider}, {"call_us": SPREAD}, {"call_us": wider}]
    figures = sampled(iter(tries))
    assert figures["call_us"] == clocks.spread(SPREAD)
    assert figures["noisy"] == ["kernels"]


@pytest.mark.parametrize(("launch_us", "noisy"), [(10.0, []), (35.0, ["kernels"])])
def test_unrest_counts_launch_time_of_a_replay(launch_us: float, noisy: list[str]) -> None:
    wall = [time + launch_us for time in QUIET]
    tries = [{"kernels_us": QUIET, "replay_us": wall}] * 3
    assert sampled(iter(tries))["noisy"] == noisy


def test_quietest_repeats_only_the_noisy_group() -> None:
    calls = iter([SPREAD, QUIET])
    figures = quietest({"kernels": iter([{"kernels_us": QUIET}]).__next__, "call": lambda: {"call_us": next(calls)}})
    assert figures["noisy"] == []
    assert figures["call_us"] == clocks.spread(QUIET)
