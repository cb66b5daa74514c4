"""The benchmark of starts: each fresh process computes the same, and its stages add up."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench import cold_start, preparation

MODEL = """
import torch
def small():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval(), (torch.ones(2, 4),)
"""


def test_starts_compute_the_same_and_stages_add_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small_model.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    output = tmp_path / "cold_start.json"
    given = ["--cpu", "--repeats", "1", "--systems", "nimblec,ONNX Runtime", "--output", str(output)]
    cold_start.main([*given, "small_model:small"])
    systems = json.loads(output.read_text())["starts"]["small_model:small"]
    runs = [run for figures in systems.values() for run in figures["runs"]]
    assert len(runs) == 2
    for run in runs:
        assert run["output"] == pytest.approx(runs[0]["output"], abs=1e-6)
        assert run["seconds"] == pytest.approx(sum(run[name] for name in ("python", "import", "load", "run")))
    load_ms = systems["nimblec"]["runs"][0]["load_ms"]
    assert {name for name, _, _ in load_ms} >= {"import", "SHA-256", "check"}
    assert all(-1e3 <= begin <= end <= 60e3 for _, begin, end in load_ms)
    printed = capsys.readouterr().out
    assert "| small_model:small | ONNX Runtime | " in printed
    cold_start.main(["--markdown", *given])
    assert capsys.readouterr().out == printed


def test_failed_start_is_named_below_the_table() -> None:
    results = {"starts": {"m:f": {"AOTInductor": {"problem": "no GPU"}}}, "environment": {"gpu": "none", "cpu": "x"}}
    assert "\nm:f, AOTInductor: no GPU\n" in cold_start.markdown(results)


def test_preparation_names_the_mean_and_the_longest_capture() -> None:
    results = {
        "compilations": {
            f"bench.models.{name}:fp32": {"prepare_s": 9.0, "commands": 5, "stages_s": {"capture": capture}}
            for name, capture in (("a", 0.25), ("b", 0.75))
        },
        "environment": {"gpu": "NVIDIA H200, 580", "cpu": "x"},
    }
    printed = preparation.markdown(results)
    assert "Captures: 0.50 s in the mean, 0.75 s at most." in printed
    assert "| a:fp32 | 5 | 9.0 | 0.00 | 0.00 | 0.00 | 0.25 |" in printed
