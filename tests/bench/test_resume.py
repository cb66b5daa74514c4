"""The benchmark of resuming from a saved state: a fresh process without torch repeats the next loss."""

import json
from functools import partial
from pathlib import Path

import pytest

from bench import compiling, resume
from bench.models import training_networks

STAGES = ("python", "import", "load", "state", "step")


def test_resume_repeats_the_loss_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = training_networks.step  # no prediction is run
    monkeypatch.setattr(training_networks, "step", lambda *asked: {"train": step(*asked)["train"]})
    monkeypatch.setattr(compiling, "options", partial(compiling.options, streams="1"))
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
