"""Calls like earlier ones, which are not checked again: they are refused, and see changes, as first calls do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, write_model
from onnx import TensorProto, helper

import nimblec
import nimblert
from nimblert.errors import InputError
from nimblert.executable import Executable

SIZE = 256
node = helper.make_node


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan of two launches, large enough for several threads; its second input is an index into eight rows."""
    folder = tmp_path_factory.mktemp("plans")
    model = write_model(
        folder / "model.onnx",
        [node("MatMul", ["x", "w"], ["a"]), node("Gather", ["a", "i"], ["y"])],
        [floats("x", SIZE, SIZE), ("i", TensorProto.INT64, (2,))],
        [floats("y", 2, SIZE)],
        constants={"w": np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)},
    )
    nimblec.compile(model, target="cpu", plan_cache=None).save(folder / "m.plan")
    return folder / "m.plan"


@pytest.fixture
def model(path: Path) -> Iterator[Executable]:
    with nimblert.load(path) as loaded:
        loaded.run(arrays(0))
        yield loaded


def arrays(seed: int, rows: tuple[int, int] = (3, 1)) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((SIZE, SIZE)).astype(np.float32)
    return {"x": x, "i": np.array(rows, np.int64)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({**arrays(0), "x": np.zeros((SIZE, SIZE))}, "input 'x': dtype float64, expected float32"),
        ({**arrays(0), "x": np.zeros((1, SIZE), np.float32)}, r"input 'x': shape \(1, 256\), expected"),
        ({**arrays(0), "x": np.ma.MaskedArray(np.zeros((SIZE, SIZE), np.float32))}, "plans have no masks"),
        ({"x": arrays(0)["x"]}, "input 'i' is missing"),
        ({**arrays(0), "z": np.zeros(1)}, "input 'z' is not one of the plan's inputs"),
        ([1], "inputs: got list, expected a dict"),
    ],
)
def test_array_that_does_not_fit_is_refused_after_calls_that_did(model: Executable, given: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        model.run(given)


@pytest.mark.parametrize(
    ("more", "named", "sentence"),
    [
        ((), {"out": {}}, r"'out' is not one of the plan's inputs .*; out= is an option of run\({name: array}\)$"),
        ((), {"z": 0}, r"'z' is not one of the plan's inputs \['x', 'i'\]$"),
        ((), {"x": 0}, "'x' was given by position and by name: give it once"),
        ((0,), {}, r"3 arrays were given, the plan takes 2: \['x', 'i'\]"),
    ],
)
def test_call_refuses_arguments(model: Executable, more: tuple[Any, ...], named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        model(*arrays(0).values(), *more, **named)


def test_failing_op_is_refused_and_the_next_call_is_right(model: Executable) -> None:
    expected = model.run(arrays(1))["y"]
    for _ in range(2):
        with pytest.raises(InputError, match=r"op .*Gather.*: failed on these inputs: .*out of data bounds"):
            model.run(arrays(1, rows=(3, 9999)))
        assert np.array_equal(model.run(arrays(1))["y"], expected)


def test_changes_of_the_context_hold_for_calls_like_earlier_ones(model: Executable, path: Path) -> None:
    given = arrays(1)
    expected = model.run(given)["y"]
    steps = model.steps(given)
    next(steps)
    with pytest.raises(InputError, match="half done"):
        model.run(given)
    steps.close()
    assert np.array_equal(model.run(given)["y"], expected)
    bound = np.zeros((2, SIZE), np.float32)
    model.bind("y", bound)
    assert model.run(given)["y"] is bound
    assert np.array_equal(bound, expected)
    model.bind("y", None)
    bound[:] = 0
    assert np.array_equal(model.run(given)["y"], expected)
    (name,) = model.weights
    model.refit({name: np.zeros((SIZE, SIZE), np.float32)})
    assert not model.run(given)["y"].any()
    model.close()
    with pytest.raises(InputError, match="this executable is closed"):
        model.run(given)
    with nimblert.load(path) as other, other.context() as context:
        context.run(given)
        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another thread"), context.between_runs():
            pool.submit(context.run, given).result(10)


def test_replay_repeats_the_last_call(model: Executable) -> None:
    model.run(arrays(1))
    expected = model.run(arrays(2))["y"]
    model.replay()
    assert np.array_equal(model._backends["main"].outputs[0], expected)
