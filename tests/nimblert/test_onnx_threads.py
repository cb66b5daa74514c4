"""How many threads a CPU plan computes with, and where."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper

import nimblec
import nimblert
from nimblert.cpu import onnx_session, streams
from nimblert.cpu.streams import Pool
from nimblert.errors import InputError
from nimblert.executable import Executable
from nimblert.plan import Plan, Target

SIZE = 256


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    weight = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    path = write_model(
        tmp_path_factory.mktemp("model") / "model.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])],
        [floats("x", SIZE, SIZE)],
        [floats("y", SIZE, SIZE)],
        constants={"w": weight},
    )
    return plan_file(path)


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the threads as Linux lists them")
def test_a_plan_has_the_threads_that_it_is_given_and_gives_the_same_result(plan: Plan) -> None:
    x = np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype(np.float32)
    with nimblert.load(plan, threads=1) as one:
        expected = one(x)
    for threads in (1, 2, 3):
        before = tasks()
        with nimblert.load(plan, threads=threads) as model:
            assert len(tasks() - before) == threads - 1
            with model.context() as context:  # over the same session
                assert len(tasks() - before) == threads - 1
                np.testing.assert_allclose(context(x), expected, rtol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at the threads as Linux lists them")
def test_load_bounds_threads_of_streams(tmp_path: Path) -> None:
    """A plan of three streams computed on three threads, whatever ``threads`` said."""
    node = helper.make_node
    branches = [node("Tanh", ["x"], ["a"]), node("Sin", ["x"], ["b"]), node("Cos", ["x"], ["c"])]
    path = write_model(
        tmp_path / "model.onnx",
        [node("Neg", ["v"], ["x"]), *branches, node("Sum", ["a", "b", "c"], ["y"])],
        [floats("v", SIZE, SIZE)],
        [floats("y", SIZE, SIZE)],
    )
    plan = plan_file(path, streams=None)
    assert plan.programs[0].stream_count == 3
    x = np.random.default_rng(1).standard_normal((SIZE, SIZE)).astype(np.float32)
    for threads in (1, 2, 3):
        others = set(threading.enumerate())
        with nimblert.load(plan, threads=threads) as model:
            assert len(set(threading.enumerate()) - others) == threads - 1
            np.testing.assert_allclose(model(x), np.tanh(-x) + np.sin(-x) + np.cos(-x), rtol=1e-5, atol=1e-6)
    before = tasks()
    with nimblert.load(plan, threads=1) as model:
        assert len(model.profile({"v": x})) == 5
        assert tasks() <= before


def test_results_are_those_of_a_session_with_as_many_threads_bit_for_bit(tmp_path: Path) -> None:
    """Sums of so many numbers may be divided among two threads, and are then not those of one."""
    rng = np.random.default_rng(2)
    shapes = {"a": (37, 5000), "b": (5000, 129)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs = [floats(name, *array.shape) for name, array in given.items()]
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    path = write_model(tmp_path / "model.onnx", [node], inputs, [floats("y", 37, 129)])
    plan = plan_file(path)
    for threads in (1, 2):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        with nimblert.load(plan, threads=threads) as model:
            np.testing.assert_array_equal(model.run(given)["y"], session.run(None, given)[0])


def test_threads_run_on_the_processors_that_they_are_given(plan: Plan) -> None:
    processors = sorted(os.sched_getaffinity(0))
    before = tasks()
    with nimblert.load(plan, threads=[processors[0], processors[-1]]):
        (started,) = tasks() - before
        deadline = time.monotonic() + 30
        while os.sched_getaffinity(int(started)) != {processors[-1]}:  # the thread moves itself once it runs
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert os.sched_getaffinity(0) == set(processors)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_a_refit_computes_with_the_threads_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """Both what makes new weights and the sessions over them."""
    weights = {name: np.ones((SIZE, SIZE), np.float32) for name in ("v", "w")}
    node = helper.make_node
    path = write_model(
        tmp_path / "model.onnx",
        [node("MatMul", ["v", "w"], ["u"]), node("MatMul", ["x", "u"], ["y"])],
        [floats("x", SIZE, SIZE)],
        [floats("y", SIZE, SIZE)],
        constants=weights,
    )
    plan = nimblec.compile(path, target="cpu", refittable=True, plan_cache=None)
    counts: list[int] = []
    options = onnx_session.session_options

    def noted(pool: Pool | None = None) -> Any:
        counts.append(1 if pool is None else pool.count)
        return options(pool)

    with nimblert.load(plan, threads=threads) as model:
        monkeypatch.setattr(onnx_session, "session_options", noted)
        model.refit({name: 2 * array for name, array in weights.items()})
    assert counts == [streams.cores() if threads is None else threads] * 2


@pytest.mark.parametrize(
    ("threads", "sentence"),
    [
        (0, "threads: 0, expected 1 to 1024"),
        (-1, "threads: -1, expected 1 to 1024"),
        ([], "threads: 0, expected 1 to 1024"),
        (1 << 40, "threads: 1099511627776, expected 1 to 1024"),
        ([0, 99999], "threads: processor 99999 is none that this process may use: "),
        ("2", "threads: got '2', expected a number, or the numbers of processors"),
        (1.5, "threads: got 1.5, expected a number, or the numbers of processors"),
    ],
)
def test_what_is_no_number_of_threads_is_refused(plan: Plan, threads: Any, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        nimblert.load(plan, threads=threads)
    assert str(caught.value).startswith(sentence)


def test_a_plan_for_a_gpu_takes_no_threads(plan: Plan) -> None:
    with pytest.raises(InputError, match="threads: a plan for a GPU computes with none of the CPU's"):
        Executable(replace(plan, target=Target.CUDA), threads=2)
