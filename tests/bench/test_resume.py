"""The benchmark of resuming from a saved state: a fresh process without torch repeats the next loss."""

import json
from functools import partial
from pathlib import Path

import pytest

from bench import resume
from bench.models import cifar_training
from nimblec.base.options import Options

STAGES = ("python", "import", "load", "state", "step")


def test_a_fresh_process_goes_on_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = cifar_training.step
    monkeypatch.setattr(cifar_training, "step", lambda *asked: {"train": step(*asked)["train"]})  # no prediction is run
    monkeypatch.setattr(resume, "Options", partial(Options, streams="1"))
    monkeypatch.setattr(resume, "_REPEATS", 1)
    output = tmp_path / "resume.json"
    resume.main(["small_batch_4", "--cpu", "--output", str(output)])
    figures = json.loads(output.read_text())
    assert figures["equal_losses"] == 2
    assert figures["torch_modules"] == 0
    (run,) = figures["runs"]
    assert run["seconds"] == pytest.approx(sum(run[name] for name in STAGES))
    assert min(run[name] for name in STAGES) > 0
    printed = capsys.readouterr().out
    assert "| small_batch_4, CPU target | " in printed
    resume.main(["--markdown", "--output", str(output)])
    assert capsys.readouterr().out == printed


def test_the_table_is_of_the_median_start() -> None:
    runs = [{"seconds": float(n), **dict.fromkeys(STAGES, n / 5)} for n in (1, 2, 4)]
    environment = {"gpu": "none", "cpu": "x", "commit": "abc"}
    sizes = {"plan_nbytes": 3e6, "state_nbytes": 2e6}
    results = {"model": "m", "level": 0, "runs": runs, "equal_losses": 4, "torch_modules": 0, **sizes}
    line = resume.markdown({"environment": environment, **results}).splitlines()[2]
    assert line == "| m, -O0 | 2.00 s (1.00 to 4.00) | 0.40 | 0.40 | 0.40 | 0.40 | 0.40 | 4 of 4 | 0 | 3.0 / 2.0 |"
