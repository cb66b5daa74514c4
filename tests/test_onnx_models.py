"""Whole models of both torch exporters: the ATen graph gives what ONNX Runtime gives."""

import importlib
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exported_models import MODELS

from nimblec.frontend.onnx import import_model

LARGER = ["resnet", "mobilenet", "inception", "bert", "unet"]


def exported(family: str, opset: int | None, path: Path) -> tuple[torch.Tensor, ...]:
    """Export a small model with random weights by the dynamo exporter, or by the older one at an opset."""
    torch.manual_seed(0)
    make = MODELS[family] if family in MODELS else importlib.import_module(f"families.{family}").small
    module, inputs = make()
    how = {"dynamo": True} if opset is None else {"dynamo": False, "opset_version": opset}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), inputs, str(path), verbose=False, **how)
    return inputs


@pytest.mark.parametrize("family", [*LARGER, *MODELS])
def test_a_file_of_the_older_exporter_gives_what_onnx_runtime_gives(family: str, tmp_path: Path) -> None:
    check(family, 17, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", [*LARGER, *MODELS])
def test_a_file_of_opset_14_gives_what_onnx_runtime_gives(family: str, tmp_path: Path) -> None:
    check(family, 14, tmp_path / "model.onnx")


@pytest.mark.parametrize("family", ["bert", "swin", "llama", "lstm_tagger"])
def test_a_file_of_the_dynamo_exporter_gives_what_onnx_runtime_gives(family: str, tmp_path: Path) -> None:
    check(family, None, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("family", [*LARGER, *MODELS])
def test_every_file_of_the_dynamo_exporter_gives_what_onnx_runtime_gives(family: str, tmp_path: Path) -> None:
    check(family, None, tmp_path / "model.onnx")


def check(family: str, opset: int | None, path: Path) -> None:
    inputs = exported(family, opset, path)
    model = onnx.load(path)
    program = import_model(model)
    found = program.module(*inputs)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    fed = {value.name: tensor.numpy() for value, tensor in zip(session.get_inputs(), inputs, strict=True)}
    for left, right in zip(found, session.run(None, fed), strict=True):
        np.testing.assert_allclose(left.numpy(), right, rtol=1e-4, atol=1e-5)
