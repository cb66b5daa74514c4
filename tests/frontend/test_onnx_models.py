"""Whole models of both torch exporters: the ATen graph gives what ONNX Runtime gives."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from exported_models import FAMILIES, export, optimized

from nimblec.onnx_export.exporting import rules_by_operator, short_histories
from nimblec.onnx_import import model_file
from nimblec.onnx_import.importer import import_model


@pytest.mark.parametrize("family", FAMILIES)
def test_older_export_matches_onnx_runtime(family: str, tmp_path: Path) -> None:
    check(family, 17, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_opset_14_gives_what_onnx_runtime_gives(family: str, tmp_path: Path) -> None:
    check(family, 14, tmp_path / "model.onnx")


@pytest.mark.parametrize("family", ["bert", "swin", "llama", "lstm_tagger"])
def test_dynamo_export_matches_onnx_runtime(family: str, tmp_path: Path) -> None:
    check(family, None, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_dynamo_export_matches_onnx_runtime(family: str, tmp_path: Path) -> None:
    check(family, None, tmp_path / "model.onnx")


@pytest.mark.parametrize("family", ["bert", "llama", "tabular"])
def test_optimised_file_matches_onnx_runtime(family: str, tmp_path: Path) -> None:
    inputs = export(family, 14, tmp_path / "model.onnx")
    compare(optimized(tmp_path / "model.onnx", "EXTENDED"), inputs)


def check(family: str, opset: int | None, path: Path) -> None:
    with rules_by_operator(), short_histories():  # the same nodes, sooner
        inputs = export(family, opset, path)
    compare(path, inputs)


def compare(path: Path, inputs: dict[str, np.ndarray]) -> None:
    """Compare the file's ATen graph with ONNX Runtime."""
    model = model_file.load(path)
    found = import_model(model).module(*map(torch.from_numpy, inputs.values()))
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left.numpy(), right, rtol=1e-4, atol=1e-5)
