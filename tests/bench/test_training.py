"""The benchmark of training steps: all modes of a model train the same, under autocast where its name says so."""

import pytest
import torch

from bench import training
from bench.models import cifar_training
from bench.training_peer import TorchStep


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


def test_what_is_no_model_is_no_attribute() -> None:
    for name in ("resnet50", "resnet50_batch_", "resnet50_batch_2_fp8"):
        assert not hasattr(cifar_training, name)
