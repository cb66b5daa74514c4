"""The comparison of a plan's training steps with eager's: the runs and their differences."""

import argparse
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import compiling
from bench.models import training_bits as models
from bench.training_bits_peer import MODES, Run, bits, distances, figures
from nimblec.base.options import Options
from nimblec.base.stages import Observer
from nimblec.compiler import Compiled

STEPS = 3


def run(*losses: float, weight: float = 1.0, steps: int = 3) -> Run:
    state = {"model.weight": np.array([weight, 2.0], np.float32), "model.steps": np.array(steps)}
    return Run(losses=np.array(losses, np.float32), state=state)


def test_bits_counts_equal_losses() -> None:
    same = run(1.0, 2.0, np.nan)
    assert bits(same, same) == {"equal_losses": 3, "first_other": None, "unequal_state": []}
    other = run(1.0, np.nextafter(np.float32(2), np.float32(3)), np.nan, weight=-0.0)
    assert bits(other, run(1.0, 2.0, np.nan, weight=0.0)) == {
        "equal_losses": 2,
        "first_other": 1,
        "unequal_state": ["model.weight"],
    }


def test_distances_are_from_the_nearest_run() -> None:
    found = distances(run(1.0, 4.0), [run(1.0, 2.0), run(1.0, 1.0, weight=3.0), run(1.0, 3.0)])
    assert found["losses"] == {"plan": pytest.approx(0.5**0.5), "own": pytest.approx(2**0.5)}
    assert found["state"]["plan"] == 0.0
    assert found["state"]["own"] == pytest.approx(2 / 5**0.5)


@pytest.fixture(scope="module")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield the plan for the step of "small" in either mode, without its prediction: one plan of one stream."""
    kept: list[Compiled] = []
    path = tmp_path_factory.mktemp("plan") / "train.plan"
    step, compile_model = models.step, compiling.compile_model

    def compiled(spec: str, *, options: Options, output: Path, observer: Observer) -> Compiled:
        assert spec in {f"{models.__name__}:small_{mode}" for mode in MODES}
        if not kept:
            kept.append(compile_model(spec, options=replace(options, streams="1"), output=path, observer=observer))
        shutil.copy(path, output)
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "step", lambda *args, **given: {"train": step(*args, **given)["train"]})
        patch.setattr(compiling, "compile_model", compiled)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_once")
@pytest.mark.parametrize("mode", MODES)
def test_cpu_plan_takes_the_steps_of_eager(mode: str, tmp_path: Path) -> None:
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
