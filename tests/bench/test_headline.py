"""The figures of the README, from made-up results."""

from pathlib import Path
from typing import Any

import pytest

from bench import environment, headline, peers, training


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


def test_figures_name_the_gpu_of_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read = environment.read

    def elsewhere(path: Path) -> Any:
        found = read(path)
        if path.name == "peers.json":
            found["environment"]["gpu"] = "NVIDIA A100 80GB, 580.1\nNVIDIA A100 80GB, 580.1"
        return found

    monkeypatch.setattr(environment, "read", elsewhere)
    steps = headline.gpu(read(peers.FOLDER / "training.json"))
    assert "batch 1 on an A100,\n" in headline.markdown()
    assert f"at batch 32 on an {steps}.\n" in headline.markdown()
