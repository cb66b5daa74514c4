"""The benchmark of training steps: all modes of a model train the same, under autocast where its name says so."""

from dataclasses import replace

import pytest
import torch
from copying import copying, on_host

import nimblert
from bench import training
from bench.models import cifar_training
from bench.nimblec_peer import gpu_us
from bench.training_peer import TorchStep, steps_alone

pytest_plugins = ("gpu_memory",)


@pytest.mark.parametrize(("options", "name"), [([], "small_batch_4"), (["--autocast", "bf16"], "small_batch_4_bf16")])
def test_all_modes_train_the_same(options: list[str], name: str) -> None:
    (jobs,) = training.table(training.parser().parse_args([*options, "small_batch_4"])).jobs
    assert {job.model for job in jobs} == {name}
    assert [job.mode for job in jobs] == list(training.MODES)
    eager = TorchStep(name, "cpu", compiled=False)
    module, batch = getattr(cifar_training, name)()["train"]
    assert module.autocast is (torch.bfloat16 if options else None)
    with torch.no_grad():
        found = [float(module(*batch)["loss"]) for _ in range(3)]
    assert found == pytest.approx([eager() for _ in range(3)], rel=1e-3)


@on_host
def test_the_gpu_time_is_that_of_the_training_step(put: object) -> None:
    del put
    made = [copying((size,), (0,)) for size in (4, 8)]
    named = [replace(p.programs[0], name=n, entry=n) for p, n in zip(made, ("evaluate", "train"), strict=True)]
    plan = replace(made[0], programs=tuple(named))
    steps = steps_alone(plan)
    assert list(steps) == ["kernels", "chain"]
    for step in steps.values():
        assert step.programs[0].inputs[0].shape == (8,)
        with nimblert.load(step) as loaded:
            assert gpu_us(loaded).min() > 0


def test_what_is_no_model_is_no_attribute() -> None:
    for name in ("resnet50", "resnet50_batch_", "resnet50_batch_2_fp8"):
        assert not hasattr(cifar_training, name)
