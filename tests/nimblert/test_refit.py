"""Weights replaced in a loaded plan: in place, all or none, equal bit for bit to a fresh compile."""

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_plans import floats, write_model
from onnx import helper

import nimblec
import nimblert
from nimblert import Executable
from nimblert.errors import InputError

WIDTH = 64
node = helper.make_node
Weights = Mapping[str, np.ndarray]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8


def weights(seed: int) -> dict[str, np.ndarray]:
    return {"w": drawn(seed, WIDTH, WIDTH), "v": drawn(seed + 1, WIDTH, WIDTH), "bias": drawn(seed + 2, WIDTH)}


def compiled(folder: Path, given: Weights, **options: Any) -> Path:
    """Return the plan of tanh(x @ w) @ v + bias + gather(w)."""
    path = write_model(
        folder / "model.onnx",
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Tanh", ["a"], ["b"]),
            node("MatMul", ["b", "v"], ["c"]),
            node("Add", ["c", "bias"], ["d"]),
            node("Gather", ["w", "rows"], ["e"]),
            node("Mul", ["d", "e"], ["y"]),
        ],
        [floats("x", 4, WIDTH), ("rows", onnx.TensorProto.INT64, [4])],
        [floats("y", 4, WIDTH)],
        constants=given,
    )
    plan = folder / "model.plan"
    nimblec.compile(path, target="cpu", plan_cache=None, **options).save(plan)
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("refit"), weights(0))


@pytest.fixture
def model(plan: Path) -> Iterator[Executable]:
    with nimblert.load(plan) as executable:
        yield executable


INPUTS = {"x": drawn(9, 4, WIDTH), "rows": np.array([3, 1, 2, 0])}


def outputs_of(folder: Path, given: Weights) -> np.ndarray:
    """Return what a plan gives that is compiled afresh with these weights."""
    with nimblert.load(compiled(folder, given)) as fresh:
        return fresh.run(INPUTS)["y"]


def test_a_refit_equals_a_fresh_compile_bit_for_bit(model: Executable, tmp_path: Path) -> None:
    before = model.run(INPUTS)["y"]
    assert set(model.weights) == {"w", "v", "bias"}
    model.refit(weights(5))
    after = model.run(INPUTS)["y"]
    assert not np.array_equal(before, after)
    assert np.array_equal(after, outputs_of(tmp_path, weights(5)))
    model.refit(weights(0))
    assert np.array_equal(model.run(INPUTS)["y"], before)


def test_another_load_of_the_file_keeps_its_weights(plan: Path, model: Executable) -> None:
    with nimblert.load(plan) as other:
        before = other.run(INPUTS)["y"]
        model.refit(weights(5))
        assert not np.array_equal(model.run(INPUTS)["y"], before)
        assert np.array_equal(other.run(INPUTS)["y"], before)
        with nimblert.load(plan) as third:
            assert np.array_equal(third.run(INPUTS)["y"], before)


def test_arrays_are_copied_in_any_layout(model: Executable) -> None:
    given = weights(5)
    model.refit(given)
    expected = model.run(INPUTS)["y"]
    turned = {name: np.asfortranarray(array) for name, array in given.items()}
    model.refit(weights(0))
    model.refit(turned)
    for array in turned.values():
        array[...] = np.nan
    assert np.array_equal(model.run(INPUTS)["y"], expected)


def test_replay_and_contexts_see_the_new_weights(model: Executable) -> None:
    context = model.context()
    inputs = [one._backends[one.program.name].inputs[0] for one in (model, context)]
    old = model.run(INPUTS)["y"]
    assert np.array_equal(context.run(INPUTS)["y"], old)
    model.refit(weights(5))
    model.replay()
    new = model._backends[model.program.name].outputs[0].copy()
    assert not np.array_equal(new, old)
    context.replay()
    replayed = context._backends[context.program.name].outputs[0]
    for found in (replayed, context.run(INPUTS)["y"], model.context().run(INPUTS)["y"]):
        assert np.array_equal(found, new)
    for one, memory in zip((model, context), inputs, strict=True):
        assert np.shares_memory(one._backends[one.program.name].inputs[0], memory)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"w": np.zeros((WIDTH, 3), np.float32)}, r"weight 'w': shape \(64, 3\), expected \(64, 64\)"),
        ({"w": np.zeros((WIDTH, WIDTH))}, "weight 'w': dtype float64, expected float32: use .astype"),
        ({"w": [[1.0]]}, "weight 'w': got list, expected a numpy array"),
        ({"vv": np.zeros(3)}, r"weight 'vv': not one of the 3 .*; the model may name it otherwise \(see `w"),
        ({3: np.zeros(3)}, r"weight 3: not one of the 3 .* no output depends on it \(leave it out\)"),
        ([1], "refit: got list, expected a dict of arrays by name, or the path of a safetensors file"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(model: Executable, given: Any, sentence: str) -> None:
    before = model.run(INPUTS)["y"]
    with pytest.raises(InputError, match=sentence):
        model.refit({**weights(5), **given} if isinstance(given, dict) else given)
    assert np.array_equal(model.run(INPUTS)["y"], before)


def test_unknown_weight_suggests_one_of_its_shape(model: Executable) -> None:
    others = {name: array for name, array in weights(5).items() if name != "v"}
    with pytest.raises(InputError, match=r"weight 'vv': not one of the 3 .*; did you mean 'v'\?"):
        model.refit({**others, "vv": weights(5)["v"]})


def test_a_half_done_run_by_steps_refuses_a_refit(model: Executable) -> None:
    context = model.context()
    steps = context.steps(INPUTS)
    next(steps)
    with pytest.raises(InputError, match="half done"):
        model.refit(weights(5))
    steps.close()
    model.refit(weights(5))


def test_a_closed_executable_refuses(plan: Path) -> None:
    model = nimblert.load(plan)
    model.close()
    with pytest.raises(InputError, match="closed"):
        model.refit(weights(5))


def test_a_run_is_of_the_old_weights_or_of_the_new_ones(model: Executable) -> None:
    """Threads with contexts of their own run while weights go to and fro: no output is of both."""
    expected = {}
    for seed in (0, 5):
        model.refit(weights(seed))
        expected[seed] = model.run(INPUTS)["y"]
    stop = threading.Event()

    def work(_: int) -> tuple[int, int]:
        seen = dict.fromkeys(expected, 0)
        with model.context() as context:
            while not stop.is_set():
                found = context.run(INPUTS)["y"]
                (seed,) = [seed for seed, array in expected.items() if np.array_equal(array, found)]
                seen[seed] += 1
        return seen[0], seen[5]

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, n) for n in range(4)]
        for number in range(40):
            model.refit(weights(5 if number % 2 else 0))
        stop.set()
        counts = [result.result() for result in results]
    assert all(sum(column) for column in zip(*counts, strict=True))


def test_a_safetensors_file(model: Executable, tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy", reason="needs safetensors: not installed")
    model.refit(weights(5))
    expected = model.run(INPUTS)["y"]
    model.refit(weights(0))
    numpy_files.save_file(weights(5), tmp_path / "new.safetensors")
    for path in (tmp_path / "new.safetensors", str(tmp_path / "new.safetensors")):
        model.refit(path)
        assert np.array_equal(model.run(INPUTS)["y"], expected)
    numpy_files.save_file({**weights(0), "more": np.zeros(2)}, tmp_path / "more.safetensors")
    with pytest.raises(InputError, match="weight 'more': not one of the 3"):
        model.refit(tmp_path / "more.safetensors")
    assert np.array_equal(model.run(INPUTS)["y"], expected)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", bytes(100), b"\xff" * 16, None])
def test_a_file_that_is_no_safetensors_file(model: Executable, tmp_path: Path, content: bytes | None) -> None:
    """A pickle among them: nothing of it is run."""
    pytest.importorskip("safetensors", reason="needs safetensors: not installed")
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path.name}: is no safetensors file that can be read"):
        model.refit(path)


@pytest.mark.parametrize(
    ("dtype", "sentence"),
    [
        ("bfloat16", "weight 'w': dtype bfloat16, expected float32"),
        ("float8_e4m3fn", "'w' has dtype F8_E4M3, which no plan has: convert it"),
    ],
)
def test_a_file_of_other_dtypes(model: Executable, tmp_path: Path, dtype: str, sentence: str) -> None:
    torch = pytest.importorskip("torch")
    torch_files = pytest.importorskip("safetensors.torch", reason="needs safetensors: not installed")
    path = tmp_path / "weights.safetensors"
    torch_files.save_file({"w": torch.ones(WIDTH, WIDTH).to(getattr(torch, dtype))}, path)
    with pytest.raises(InputError, match=sentence):
        model.refit(path)


def test_refit_names_missing_package(model: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(InputError, match=r"pip install 'nimblert\[safetensors\]'"):
        model.refit(tmp_path / "weights.safetensors")
