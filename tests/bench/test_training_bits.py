"""The comparison of a plan's training steps with eager's: the runs, their differences, and the table."""

import argparse
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import training_bits, training_bits_peer
from bench.models import training_bits as models
from bench.training_bits_peer import MODES, Run, bits, distances, drawn, eager, figures
from nimblec.base.options import Options
from nimblec.base.stages import Observer
from nimblec.compiler import Compiled
from nimblec.training.state import OFFSET, SEED
from nimblert.plan import Target

STEPS = 3


def run(*losses: float, weight: float = 1.0, steps: int = 3) -> Run:
    state = {"model.weight": np.array([weight, 2.0], np.float32), "model.steps": np.array(steps)}
    return Run(losses=np.array(losses, np.float32), state=state)


def test_bits_that_differ_are_found() -> None:
    same = run(1.0, 2.0, np.nan)
    assert bits(same, same) == {"equal_losses": 3, "first_other": None, "unequal_state": []}
    other = run(1.0, np.nextafter(np.float32(2), np.float32(3)), np.nan, weight=-0.0)
    assert bits(other, run(1.0, 2.0, np.nan, weight=0.0)) == {
        "equal_losses": 2,
        "first_other": 1,
        "unequal_state": ["model.weight"],
    }


def test_a_plan_is_as_far_off_as_from_eagers_nearest_run() -> None:
    found = distances(run(1.0, 4.0), [run(1.0, 2.0), run(1.0, 1.0, weight=3.0), run(1.0, 3.0)])
    assert found["losses"] == {"plan": pytest.approx(0.5**0.5), "own": pytest.approx(2**0.5)}
    assert found["state"]["plan"] == 0.0
    assert found["state"]["own"] == pytest.approx(2 / 5**0.5)


@pytest.mark.parametrize("network", ["gpt", "bert", "small"])
def test_eager_is_the_same_each_time_and_learns(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocabulary": 20, "tokens": 8, "width": 16, "heads": 2, "classes": 10}

    def batch(drawn: torch.Generator) -> models.Batch:
        shape = (3, 8) if network == "gpt" else (3,)
        return torch.randint(20, (3, 8), generator=drawn), torch.randint(10, shape, generator=drawn)

    def tiny() -> tuple[torch.nn.Module, Callable[[torch.Generator], models.Batch]]:
        return models.Transformer(**sizes, dropout=0.1, causal=network == "gpt"), batch

    if network != "small":
        monkeypatch.setitem(models.NETWORKS, network, (tiny, torch.optim.AdamW))
    before = models.parts(network)[0].state_dict()
    first, again = (eager(network, STEPS, "cpu", "plan", seed=1) for _ in range(2))
    assert bits(first, again)["equal_losses"] == STEPS
    other = eager(network, STEPS, "cpu", "plan", seed=2)
    assert other.losses[0] != first.losses[0]
    assert any((before[name].numpy() != first.state[f"model.{name}"]).any() for name in before)


@pytest.fixture(scope="module")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The step of "small" in either mode, without its prediction, is one plan of one stream."""
    kept: list[Compiled] = []
    path = tmp_path_factory.mktemp("plan") / "train.plan"
    step, compile_model = models.step, training_bits_peer.compile_model

    def compiled(spec: str, *, options: Options, output: Path, observer: Observer) -> Compiled:
        assert spec in {f"{models.__name__}:small_{mode}" for mode in MODES}
        if not kept:
            kept.append(compile_model(spec, options=replace(options, streams="1"), output=path, observer=observer))
        shutil.copy(path, output)
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "step", lambda *args, **given: {"train": step(*args, **given)["train"]})
        patch.setattr(training_bits_peer, "compile_model", compiled)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_once")
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_of_the_cpu_target_takes_eagers_steps(mode: str, tmp_path: Path) -> None:
    options = argparse.Namespace(cpu=True, fp32=False, steps=STEPS, runs=2)
    was = torch.backends.cudnn.deterministic
    try:
        found = figures("small", mode, options, tmp_path)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.cudnn.deterministic = was
    assert found["draws"] == "plan"
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(found["eager_losses"][0], rel=1e-5)
    if mode == "default":
        assert len(found["eager_losses"]) == 2
        assert found["distances"]["state"]["plan"] < 1e-3
    else:
        equal = [ours == eagers for ours, eagers in zip(found["losses"], found["eager_losses"][0], strict=True)]
        assert found["equal_losses"] == sum(equal)
        assert found["first_other"] == (None if all(equal) else equal.index(False))


def test_who_draws_is_told_by_the_plans_state_and_ops() -> None:
    def plan(state: tuple[str, ...], *ops: str, target: Target = Target.CUDA) -> Any:
        program = SimpleNamespace(ops=[SimpleNamespace(name=name) for name in ops])
        tensors = [SimpleNamespace(name=name) for name in state]
        return SimpleNamespace(state=tensors, entries={"train": (program,)}, target=target)

    draws = ("model.weight", SEED, OFFSET)
    assert drawn(plan(("model.weight",), "aten.bitwise_xor.Tensor")) == "none"
    assert drawn(plan(draws, "aten.native_dropout.default")) == "torch"
    assert drawn(plan(draws, "aten.bitwise_xor.Tensor")) == "plan"
    assert drawn(plan(draws, "Mul", target=Target.CPU)) == "plan"


RESULTS: dict[str, Any] = {
    "environment": {"gpu": "none", "cpu": "x", "commit": "abc"},
    "models": {
        "gpt": {
            "deterministic": {"draws": "none", "steps": 9, "equal_losses": 9, "unequal_state": []},
            "default": {
                "draws": "none",
                "distances": {"losses": {"plan": 1e-3, "own": 2e-3}, "state": {"plan": 0.5, "own": 0.25}},
            },
        },
        "bert": {"deterministic": {"draws": "plan", "steps": 9, "equal_losses": 8, "unequal_state": ["a", "b"]}},
        "resnet50": {"default": {"failed": "no memory"}},
    },
}


def test_the_table() -> None:
    _, _, *lines, _, below = training_bits.markdown(RESULTS).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["gpt", "none", "9 of 9", "all", "1.0e-03 / 2.0e-03", "5.0e-01 / 2.5e-01", "**no**"],
        ["bert", "the plan's, for eager too", "8 of 9", "all but 2", "-", "-", "-"],
        ["resnet50", "-", "-", "-", "-", "-", "-"],
    ]
    assert below.startswith("Commit abc")


def test_every_network_is_compared_in_both_modes() -> None:
    jobs = training_bits.table(training_bits.parser().parse_args(["--fp32"])).jobs
    assert {job.model for group in jobs for job in group} == models.NETWORKS.keys() - {"small"}
    assert all([job.mode for job in group] == list(training_bits.MODES) for group in jobs)
    assert sorted(training_bits.MODES) == sorted(MODES)
    assert all("--fp32" in job.command for group in jobs for job in group)
    for network in training_bits.NETWORKS:
        assert all(hasattr(models, f"{network}_{mode}") for mode in MODES)
    assert not hasattr(models, "gpt")
