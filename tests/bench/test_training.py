"""The benchmark of training steps: the same losses in all modes, with and without autocast."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from copying import copying, on_host

import nimblert
from bench import training
from bench.models import training_at_size, training_networks
from bench.nimblec_peer import gpu_us
from bench.training_peer import MODES, TorchStep, grown, steps_alone
from nimblec.plan import encoder

pytest_plugins = ("gpu_memory",)


@pytest.mark.parametrize(("options", "name"), [([], "small_batch_4"), (["--autocast", "bf16"], "small_batch_4_bf16")])
def test_eager_and_plan_train_the_same(options: list[str], name: str) -> None:
    (jobs,) = training.table(training.parser().parse_args([*options, "small_batch_4"])).jobs
    assert {job.model for job in jobs} == {name}
    assert {job.mode for job in jobs} == {*MODES}
    eager = TorchStep(name, "cpu", compiled=False)
    module, batch = getattr(training_networks, name)()["train"]
    assert module.autocast is (torch.bfloat16 if options else None)
    with torch.no_grad():
        found = [float(module(*batch)["loss"]) for _ in range(3)]
    assert found == pytest.approx([eager() for _ in range(3)], rel=1e-3)


def test_networks_at_their_own_size_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training_at_size.NETWORKS, "cyclegan", _small_cyclegan)
    eager = TorchStep("cyclegan_batch_1", "cpu", compiled=False)
    module, batch = training_networks.__getattr__("cyclegan_batch_1")()["train"]
    with torch.no_grad():
        found = [float(module(*batch)["loss"]) for _ in range(2)]
    assert found == pytest.approx([eager() for _ in range(2)], rel=1e-3)
    frozen = eager.module.discriminators
    assert all(parameter.grad is None for parameter in frozen.parameters())


def _small_cyclegan(batch: int) -> training_at_size.Parts:
    pairs = torch.randn(batch, 2, 3, 64, 64)
    return training_at_size.CycleGAN(2), (pairs, pairs.clone())


def test_widest_network_is_measured_in_few_modes() -> None:
    groups = training.table(training.parser().parse_args([])).jobs
    jobs = {group[0].model: {job.mode for job in group} for group in groups}
    assert jobs.pop(training.WIDEST) == {"O0", "compile", "eager"}
    assert {*jobs} == {*training.models(*training.BATCHES)}
    (only,) = training.table(training.parser().parse_args(["--modes", "O2,eager", "small_batch_4"])).jobs
    assert [job.mode for job in only] == ["O2", "eager"]


@on_host
def test_steps_alone_keep_the_training_step(put: object) -> None:
    del put
    made = [copying((size,), (0,)) for size in (4, 8)]
    named = [replace(p.programs[0], name=n, entry=n) for p, n in zip(made, ("evaluate", "train"), strict=True)]
    plan = replace(made[0], programs=tuple(named))
    for step in steps_alone(plan):
        assert step.programs[0].inputs[0].shape == (8,)
        with nimblert.load(step) as loaded:
            assert gpu_us(loaded).min() > 0


@on_host
def test_grown_is_the_memory_of_a_loaded_plan(put: object, tmp_path: Path) -> None:
    del put
    made = copying((1 << 20,), (0,))
    plan = replace(made, programs=(replace(made.programs[0], name="train", entry="train"),))
    encoder.write(plan, tmp_path / "plan")
    found = grown(tmp_path / "plan", [np.zeros(1 << 20, np.float32)])
    assert found["driver_nbytes"] >= 3 << 22  # input, arena, output


def test_training_networks_refuse_other_names() -> None:
    for name in ("resnet50", "resnet50_batch_", "resnet50_batch_2_fp8"):
        assert not hasattr(training_networks, name)
