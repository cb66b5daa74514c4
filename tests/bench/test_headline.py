"""The figures of the README, from made-up results."""

from typing import Any

import pytest

from bench import headline, training


def timed(kernels_us: float, **others: float) -> dict[str, Any]:
    """A row of results."""
    return {clock: {"median": us} for clock, us in {"kernels_us": kernels_us, **others}.items()}


def test_the_speedup_is_of_the_networks_at_batch_1_that_both_sides_have() -> None:
    models = {
        "a:fp16": {"compile": timed(100), "freeze": timed(80), "-O2": timed(40)},
        "a:fp16_batch_4": {"compile": timed(1000), "-O2": timed(1)},
        "b:fp16": {"compile": timed(80), "-O2": timed(10)},
        "c:fp16": {"compile": timed(80)},
    }
    mean, count = headline.speedup({"models": models})
    assert (mean, count) == (pytest.approx(4), 2)


def test_training_is_of_the_three_networks_and_calls_alone() -> None:
    ours = [timed(9, call_us=us) for us in (50, 25, 100)]
    models = {
        f"{network}_batch_32": {"compile": timed(1, call_us=100), "O2": figures}
        for network, figures in zip(training.NETWORKS, ours, strict=True)
    }
    assert headline.training_speedup({"models": models}) == pytest.approx(2)


def test_scheduling_is_the_chain_over_the_schedule() -> None:
    models = {"a": {"-O0": timed(10, chain_us=20)}, "b": {"-O0": timed(10, chain_us=80)}, "c": {"graph": timed(1)}}
    mean, count = headline.scheduling({"models": models})
    assert (mean, count) == (pytest.approx(4), 2)


def test_the_coverage_is_of_core_cases() -> None:
    cases = [{"core": True, "status": "pass"}, {"core": True, "status": "refused"}, {"core": False, "status": "pass"}]
    assert headline.coverage(cases) == (1, 2)


def test_figures_name_their_gpu() -> None:
    assert headline.gpu({"environment": {"gpu": "NVIDIA H100 80GB HBM3, 580.1\nNVIDIA H100 80GB"}}) == "H100"
