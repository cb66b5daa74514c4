"""The recipe for Triton: the commands of docs/serving.md make a model repository, whose model.py runs in a stand-in."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as stand_in
from serving import Shop, command
from subprocesses import ROOT

import nimblec
import nimblert
from nimblert.check.verify import read_plan


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shop = Shop(tmp_path_factory.mktemp("triton"))
    for words in ("nimblec compile", "mkdir -p models"):
        shop.run(command(words))
    return shop.folder / "models"


ARGUMENTS = {
    "model_config": '{"max_batch_size": 8}',
    "model_instance_kind": "CPU",
    "model_instance_device_id": "0",
    "model_repository": "models/digits",
    "model_version": "1",
    "model_name": "digits",
}


@pytest.fixture
def made(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the model as Triton makes it: the folder of its version is where it finds modules."""
    folder = repository / "digits" / "1"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.TritonPythonModel()
    sys.modules.pop("rows", None)


@pytest.fixture
def model(made: Any) -> Iterator[Any]:
    made.initialize(ARGUMENTS)
    yield made
    made.finalize()


def request(name: str, array: np.ndarray, *wanted: str) -> stand_in.InferenceRequest:
    return stand_in.InferenceRequest([stand_in.Tensor(name, array)], wanted or ("digit", "probabilities"))


def image(digit: int) -> np.ndarray:
    return np.asarray(np.load(ROOT / "samples" / f"digit_{digit}.npy"))


def test_requests_run_together_and_each_has_its_own_response(model: Any) -> None:
    wrong = request("image", np.zeros((1, 8, 8), np.float32))
    three = np.concatenate([image(0), image(3), image(9)])
    responses = model.execute(
        [request("image", image(7)), wrong, request("image", three, "digit"), request("picture", image(7))]
    )
    seven, refused, digits, unnamed = responses
    found = {tensor.name(): tensor.as_numpy() for tensor in seven.output_tensors()}
    assert found["digit"].tolist() == [7]
    assert found["probabilities"].shape == (1, 10)
    (only,) = digits.output_tensors()
    assert (only.name(), only.as_numpy().tolist()) == ("digit", [0, 3, 9])
    assert refused.error().message() == "input 'image': shape (1, 8, 8), expected (rows, 1, 8, 8)"
    assert refused.error().code == unnamed.error().code == stand_in.TritonError.INVALID_ARG
    assert unnamed.error().message() == "inputs: [], expected ['image']"


def test_refused_values_fail_only_their_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index out of range is found as late as the run of the batch."""
    run = type(model._plan).run

    def refusing(self: Any, arrays: dict[str, np.ndarray]) -> Any:
        if np.isnan(arrays["image"]).any():
            raise nimblert.InputError("index out of range")
        return run(self, arrays)

    monkeypatch.setattr(type(model._plan), "run", refusing)
    good, bad = model.execute([request("image", image(7), "digit"), request("image", image(7) * np.nan)])
    assert [tensor.as_numpy().tolist() for tensor in good.output_tensors()] == [[7]]
    assert bad.error().message() == "index out of range"


def test_no_request_is_right(model: Any) -> None:
    (response,) = model.execute([request("picture", image(7))])
    assert response.error() is not None
    assert model.execute([]) == []


def test_the_end_gives_the_plan_back(model: Any) -> None:
    model.finalize()
    (response,) = model.execute([request("image", image(7))])
    assert "is closed" in response.error().message()


def test_plan_of_fixed_sizes_is_refused(repository: Path, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(repository / "digits" / "1" / "model.plan")
    exact = nimblert.load(replace(plan, programs=tuple(replace(program, fits=()) for program in plan.programs)))
    monkeypatch.setattr(nimblert, "load", lambda *_, **__: exact)
    with exact, pytest.raises(stand_in.TritonModelException, match="the plan's batch cannot be padded and split"):
        made.initialize(ARGUMENTS)


def test_a_plan_of_one_row_is_not_given_several(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = nimblec.compile(ROOT / "samples" / "digits.onnx", target="cpu", plan_cache=None)
    with nimblert.load(plan) as single:
        monkeypatch.setattr(nimblert, "load", lambda *_, **__: single)
        with pytest.raises(stand_in.TritonModelException, match="takes one row, and max_batch_size is 8: "):
            made.initialize(ARGUMENTS)
        made.initialize({**ARGUMENTS, "model_config": '{"max_batch_size": 1}'})
        (response,) = made.execute([request("image", image(7), "digit")])
        assert [tensor.as_numpy().tolist() for tensor in response.output_tensors()] == [[7]]


def test_the_configuration_is_of_the_plan(repository: Path) -> None:
    text = (repository / "digits" / "config.pbtxt").read_text()
    plan = read_plan(repository / "digits" / "1" / "model.plan")
    types = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}
    found = re.findall(r'name: "(\w+)", data_type: (\w+), dims: \[ ([\d, ]*) \]', text)
    program = plan.programs[0]
    expected = [
        (tensor.name, types[tensor.dtype], ", ".join(map(str, tensor.shape[1:] or (1,))))
        for tensor in (*program.inputs, *program.outputs)
    ]
    assert found == expected
    (largest,) = re.findall(r"^max_batch_size: (\d+)$", text, re.MULTILINE)
    assert int(largest) == max(program.inputs[0].shape[0] for program in plan.programs)
    assert text.count("{") == text.count("}")
