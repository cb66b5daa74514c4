"""Every exported family, and files that ONNX Runtime optimised: compile, save, load, run; equal bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from exported_models import FAMILIES, export, optimized

import nimblec
import nimblert
from nimblec.onnx_export.exporting import rules_by_operator, short_histories

QUICK = ["lstm_tagger", "swin", "diffusion", "recommender"]
OLD, DYNAMO = 17, None
EXPORTERS = pytest.mark.parametrize("opset", [OLD, DYNAMO], ids=["old", "dynamo"])


@EXPORTERS
@pytest.mark.parametrize("family", QUICK)
def test_a_plan_gives_what_onnx_runtime_gives(family: str, opset: int | None, tmp_path: Path) -> None:
    with rules_by_operator(), short_histories():  # the same nodes, sooner
        inputs = export(family, opset, tmp_path / "model.onnx")
    check(tmp_path / "model.onnx", inputs)


@pytest.mark.slow
@EXPORTERS
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in QUICK])
def test_every_plan_gives_what_onnx_runtime_gives(family: str, opset: int | None, tmp_path: Path) -> None:
    check(tmp_path / "model.onnx", export(family, opset, tmp_path / "model.onnx"))


@pytest.mark.parametrize(("family", "level"), [("llama", "EXTENDED"), ("convnext", "ALL")])
def test_a_file_that_onnx_runtime_optimised(family: str, level: str, tmp_path: Path) -> None:
    inputs = export(family, 14, tmp_path / "model.onnx")
    check(optimized(tmp_path / "model.onnx", level), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_that_onnx_runtime_optimised(family: str, level: str, tmp_path: Path) -> None:
    inputs = export(family, 14, tmp_path / "model.onnx")
    check(optimized(tmp_path / "model.onnx", level), inputs)


def check(path: Path, inputs: Mapping[str, np.ndarray]) -> None:
    """Compare the plan of a file with a plain session; compiling has already replayed it without frameworks."""
    nimblec.compile(path, target="cpu").save(path.with_suffix(".plan"))
    with nimblert.load(path.with_suffix(".plan")) as executable:
        found = executable.run(inputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a warning that a file suits this machine only
    session = onnxruntime.InferenceSession(path, options)
    expected = dict(zip((value.name for value in session.get_outputs()), session.run(None, dict(inputs)), strict=True))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert np.ptp(wanted) > 1e-4, "an output that says something"
        np.testing.assert_array_equal(found[name], wanted, strict=True)
