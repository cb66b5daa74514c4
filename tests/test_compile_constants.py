"""Inputs of an ONNX model that become constants: --constant, and ``constants=`` of `nimblec.compile`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import CommandLine
from cpu_plans import floats, write_model
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper

import nimblec as package
from nimblec.base.options import read_options
from nimblec.cuda.load import load_files
from nimblec.cuda.request import CompileRequest
from nimblec.onnx_import.input_arrays import make_constant
from nimblec.onnx_import.torch_model import load_onnx
from nimblert import loading

node = helper.make_node
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    """Write a model of -x at a rate of 16000, else of x without its first axis of 1; and of a scaled x."""

    def body(made: onnx.NodeProto) -> onnx.GraphProto:
        declared = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        return helper.make_graph([made], "body", [], [declared])

    nodes = [
        node("Equal", ["rate", "high"], ["c"]),
        node("If", ["c"], ["y"], then_branch=body(node("Neg", ["x"], ["r"])),
             else_branch=body(node("Squeeze", ["x", "first"], ["r"]))),
        node("Mul", ["x", "scale"], ["z"]),
    ]  # fmt: skip
    inputs = [floats("x", "n", 3), ("rate", TensorProto.INT64, ()), floats("scale", "k")]
    constants = {"high": np.array(16000), "first": np.array([0])}
    outputs = [("y", TensorProto.FLOAT, None), floats("z", "n", 3)]
    return write_model(tmp_path / "rated.onnx", nodes, inputs, outputs, constants=constants)


def test_an_input_becomes_a_constant_and_chooses_its_branch(rated: Path, tmp_path: Path, nimblec: CommandLine) -> None:
    np.save(tmp_path / "scale.npy", np.array([1, 2, 4], np.float32))
    scale = f"scale={tmp_path / 'scale.npy'}"
    plan = tmp_path / "m.plan"
    given = ("--constant", "rate=16000", "--constant", scale)
    nimblec.prints("compile", rated, "-o", plan, "--target", "cpu", "--dim", "n=2", *given)
    with loading.load(plan) as model:
        assert [tensor.name for tensor in model.inputs] == ["x"]
        found = model.run({"x": X})
    np.testing.assert_array_equal(found["y"], -X)
    np.testing.assert_array_equal(found["z"], X * np.array([1, 2, 4], np.float32))
    out = nimblec.prints("verify", plan, "--against", rated, "--per-node", *given)
    assert "against: output 'y': equal" in out
    assert nimblec.refused("verify", plan, "--against", rated).endswith(
        "its inputs are 'x', the model's 'x', 'rate', 'scale': give those that it has as constants by --constant"
    )
    assert "need --against" in nimblec.refused("verify", plan, "--constant", "rate=1")


def test_constants_in_python(rated: Path) -> None:
    given = {"rate": 8000, "scale": [0.5]}
    plan = package.compile(rated, target="cpu", dims={"n": 1}, constants=given)
    with loading.load(plan) as model:
        found = model.run({"x": X[:1]})
    np.testing.assert_array_equal(found["y"], X[0])
    np.testing.assert_array_equal(found["z"], X[:1] / 2)


def test_the_cuda_target_takes_them_from_its_request(rated: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from nimblec.base.source import Source

    options = read_options(dims={"n": 2}, constants={"rate": "16000", "scale": np.array([2], bfloat16)})
    source = Source(kind="onnx", model=str(rated))
    CompileRequest(source=source, options=options, output=tmp_path / "m.plan", sys_path=()).save(tmp_path)

    def on_cpu(path: Path, **settings: Any) -> Any:
        return load_onnx(path, **{**settings, "device": "cpu"})

    monkeypatch.setattr("nimblec.onnx_import.torch_model.load_onnx", on_cpu)
    (loaded,) = load_files(CompileRequest.load(tmp_path)).values()
    assert [name for name, _ in loaded.inputs] == ["x"]
    y, z = loaded.module(torch.from_numpy(X))
    assert torch.equal(y, torch.from_numpy(-X))
    assert torch.equal(z, torch.from_numpy(2 * X))


def model_with(dtype: int, *shape: int | str) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name in ("k", "other")]
    return helper.make_model(helper.make_graph([node("Add", ["k", "other"], ["y"])], "g", inputs, []))


@pytest.mark.parametrize(
    ("dtype", "shape", "given", "expected"),
    [
        ("INT64", (), "16000", np.array(16000)),
        ("INT32", (), 7, np.array(7, np.int32)),
        ("UINT64", (), str(2**64 - 1), np.array(2**64 - 1, np.uint64)),
        ("BOOL", (), "false", np.array(False)),
        ("BOOL", (1,), 1, np.array([True])),
        ("FLOAT", (), "3", np.array(3, np.float32)),
        ("FLOAT", (1, 1), "-1e-3", np.array([[-1e-3]], np.float32)),
        ("FLOAT", ("n",), "0.5,", np.array([0.5], np.float32)),
        ("FLOAT16", (), "inf", np.array(np.inf, np.float16)),
        ("BFLOAT16", (2,), np.array([1, 2.5], bfloat16), np.array([1, 2.5], bfloat16)),
        ("INT64", (2,), "1,2", np.array([1, 2])),
        ("INT64", ("n", 2), torch.tensor([[1, 2]]), np.array([[1, 2]])),
        ("DOUBLE", (), np.float32(0.25), np.array(0.25)),
    ],
)
def test_numbers_take_the_dtype_of_the_input(dtype: str, shape: tuple[Any, ...], given: Any, expected: Any) -> None:
    model = model_with(getattr(TensorProto, dtype), *shape)
    make_constant(model, read_options(constants={"k": given}).constants)
    assert [value.name for value in model.graph.input] == ["other"]
    (made,) = model.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(made), expected, strict=True)


@pytest.mark.parametrize(
    ("dtype", "shape", "given", "sentence"),
    [
        ("INT64", (), 0.5, "--constant k: 0.5 does not fit the dtype of the model's input, int64: give values that do"),
        ("INT64", (), True, "--constant k: True does not fit the dtype of the model's input, int64"),
        ("UINT8", (2,), [1, 300], "--constant k: [1, 300] does not fit the dtype of the model's input, uint8"),
        ("INT64", (), 2**64 - 1, "does not fit the dtype of the model's input, int64"),
        ("UINT64", (), -1, "-1 does not fit the dtype of the model's input, uint64"),
        ("BOOL", (), 2, "2 does not fit the dtype of the model's input, bool"),
        ("FLOAT16", (), 1e9, "1000000000.0 does not fit the dtype of the model's input, float16"),
        ("INT64", (3,), [1, 2], "--constant k: an array of int64 2, expected int64 3"),
        ("INT64", ("n",), 4, "--constant k: an array of int64 scalar, expected int64 ?"),
        ("INT64", (), [4], "--constant k: an array of int64 1, expected int64 scalar"),
    ],
)
def test_values_that_do_not_fit_are_refused(dtype: str, shape: tuple[Any, ...], given: Any, sentence: str) -> None:
    constants = read_options(constants={"k": given}).constants
    with pytest.raises(package.UnsupportedModelError, match=re.escape(sentence)):
        make_constant(model_with(getattr(TensorProto, dtype), *shape), constants)


def test_other_names_and_models_are_refused(rated: Path) -> None:
    with pytest.raises(package.CompileError, match="--constant gain: the model has no such input; its inputs are 'x'"):
        package.compile(rated, target="cpu", constants={"gain": 1})
    for target in ("cpu", "auto"):
        with pytest.raises(package.CompileError, match="--constant x: only inputs of an ONNX model become"):
            package.compile(torch.nn.Identity(), torch.ones(2), target=target, constants={"x": 1})


NO_NUMBERS = ["many", "", object(), [[1], [2, 3]], 2**70, "1e999", "9" * 400, "9" * 5000, {"a": 1}, np.array(["a"])]


@pytest.mark.parametrize("given", NO_NUMBERS)
def test_what_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(package.ArgumentError, match=r"constants: 'rate'.*, expected an? "):
        read_options(constants={"rate": given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["rate"], "'rate' is not NAME=VALUE, such as rate=16000 or mask=mask.npy"),
        (["rate=often"], "'often', expected a number such as 16000, true or 0.5, or several (1,2)"),
        (["rate=missing.npy"], "missing.npy: No such file or directory"),
        (["rate=1", "--constant", "rate=2"], "input 'rate' was given twice: give it once"),
    ],
)
def test_command_refuses(rated: Path, tmp_path: Path, nimblec: CommandLine, given: list[str], sentence: str) -> None:
    said = nimblec.refused("compile", rated, "-o", tmp_path / "m.plan", "--target", "cpu", "--constant", *given)
    assert sentence in said


def test_a_file_of_a_constant_is_not_overwritten(rated: Path, nimblec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "rate.npy"
    np.save(path, 16000)
    said = nimblec.refused("compile", rated, "-o", path, "--target", "cpu", "--constant", f"rate={path}")
    assert "is read by this compilation, and would be overwritten" in said
