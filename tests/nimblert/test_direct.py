"""The usual call of a CPU plan in one piece: what it costs in Python, what ends it, and runs in a crowd."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, write_model
from onnx import TensorProto, helper
from subprocesses import python

import nimblec
import nimblert
from nimblert.cpu.direct import AtWork, Direct, at_work
from nimblert.errors import InputError
from nimblert.executable import Executable

SIZE = 256
node = helper.make_node


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two launches, large enough for several threads; its second input is an index into eight rows."""
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


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimblert.cpu.onnx_threads.cores", lambda: 2)
    monkeypatch.setattr("nimblert.cpu.direct.at_work._calm", 1 << 30)  # as after many calls of one thread


@pytest.fixture
def model(path: Path) -> Iterator[Executable]:
    with nimblert.load(path) as loaded:
        loaded.run(arrays(0))  # calls in one piece are made by one that is not
        yield loaded


def arrays(seed: int, rows: tuple[int, int] = (3, 1)) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((SIZE, SIZE)).astype(np.float32)
    return {"x": x, "i": np.array(rows, np.int64)}


def called(call: Callable[[], object]) -> list[str]:
    """The functions of Python that a call runs, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the call itself


@contextmanager
def crowd() -> Iterator[None]:
    """Others are at work on both cores."""
    others = [object(), object()]
    at_work.update(others)
    yield
    at_work.difference_update(others)


def test_a_usual_call_is_few_functions_of_python_and_binds_nothing(model: Executable) -> None:
    given = arrays(1)
    with model.context() as context:
        context.run(given)
        for target in (model, context):
            functions = ["Context.run", "Context._run", "Direct.__call__", "AtWork.are_crowd"]
            assert called(lambda target=target: target.run(given)) == functions


def test_outputs_are_the_callers(model: Executable) -> None:
    first = model.run(arrays(1))["y"]
    kept = first.copy()
    second = model.run(arrays(2))["y"]
    assert not np.array_equal(first, second)
    assert np.array_equal(first, kept)
    assert first.flags.owndata


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
def test_what_does_not_fit_is_refused_as_ever(model: Executable, given: Any, sentence: str) -> None:
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
def test_a_call_with_too_much_is_refused(
    model: Executable, more: tuple[Any, ...], named: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        model(*arrays(0).values(), *more, **named)


def test_an_op_that_fails_is_a_sentence_and_the_next_call_is_whole(model: Executable) -> None:
    expected = model.run(arrays(1))["y"]
    for _ in range(2):
        with pytest.raises(InputError, match=r"op .*Gather.*: failed on these inputs: .*out of data bounds"):
            model.run(arrays(1, rows=(3, 9999)))
        assert not at_work
        assert np.array_equal(model.run(arrays(1))["y"], expected)


def test_what_a_call_has_to_look_at_is_looked_at(model: Executable, path: Path) -> None:
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
        with context._turn.lock, pytest.raises(InputError, match="at work in another thread"):
            context.run(given)


def test_a_replay_is_of_the_last_call(model: Executable) -> None:
    model.run(arrays(1))
    expected = model.run(arrays(2))["y"]
    model.replay()
    assert np.array_equal(model.backend.outputs[0], expected)


FORKED = f"""
import os, sys
import numpy as np
import nimblert

given = {{"x": np.zeros(({SIZE}, {SIZE}), np.float32), "i": np.zeros(2, np.int64)}}
model = nimblert.load(sys.argv[1])
for _ in range(3):
    model.run(given)
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    model.run(given)
except nimblert.InputError as exc:
    print(exc, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_is_told_to_load_again(path: Path) -> None:
    assert "load the plan again in this one" in python(FORKED, path)


def test_in_a_crowd_a_run_is_on_its_callers_thread_alone(
    model: Executable, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nimblert.load(path, threads=1) as one:
        expected = one.run(arrays(1))["y"]
    with crowd():
        assert np.array_equal(model.run(arrays(1))["y"], expected)
        direct = model._direct["main"]
        assert direct._alone is not None
        monkeypatch.setattr(direct, "_step", None)  # it would have to be in another way
        assert np.array_equal(direct(arrays(1))["y"], expected)
    assert len(at_work) == 0
    assert Direct.__call__(direct, arrays(1)) is not None  # the crowd was there a moment ago
    monkeypatch.setattr("nimblert.cpu.direct.at_work._calm", 1 << 30)
    assert direct(arrays(1)) is None


def test_a_number_of_threads_that_was_asked_for_holds_in_a_crowd(path: Path) -> None:
    with nimblert.load(path, threads=2) as model, crowd():
        model.run(arrays(1))
        sessions = len(model._resident.sessions)
        model.run(arrays(1))
        assert len(model._resident.sessions) == sessions == 1


def test_a_crowd_is_over_after_some_calls_of_one() -> None:
    runs = AtWork()
    assert not runs.are_crowd(2)
    runs.update([1, 2])
    assert runs.are_crowd(2)
    runs.clear()
    assert [runs.are_crowd(2) for _ in range(17)] == [True] * 16 + [False]
