"""Contexts over one executable: independent, for threads; arenas that plans share; outputs in the caller's memory."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper

import nimblert
from nimblec.plan import encoder
from nimblert import Arena, Executable
from nimblert.cpu.backend import CpuBackend, CpuLoaded
from nimblert.errors import InputError

WIDTH = 64
node = helper.make_node


def saved(folder: Path, name: str, rows: int) -> Path:
    """Write tanh(x @ w) @ w for (rows, WIDTH) as a plan whose arena holds the middle."""
    weight = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
    path = write_model(
        folder / f"{name}.onnx",
        [node("MatMul", ["x", "w"], ["a"]), node("Tanh", ["a"], ["b"]), node("MatMul", ["b", "w"], ["y"])],
        [floats("x", rows, WIDTH)],
        [floats("y", rows, WIDTH)],
        constants={"w": weight},
    )
    plan = plan_file(path, joins=False)
    assert plan.arena_nbytes
    encoder.write(plan, folder / f"{name}.plan")
    return folder / f"{name}.plan"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("contexts"), "small", 4)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("contexts"), "large", 32)


@pytest.fixture
def model(small: Path) -> Iterator[Executable]:
    with nimblert.load(small) as executable:
        yield executable


def drawn(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def test_context_has_own_memory(model: Executable) -> None:
    context = model.context()
    first, second = (one._backends[one.program.name] for one in (model, context))
    assert isinstance(first, CpuBackend)
    assert isinstance(second, CpuBackend)
    for mine, other in zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True):
        assert not np.shares_memory(mine, other)
    assert model._loaded is context._loaded
    assert isinstance(model._loaded, CpuLoaded)
    sessions = model._loaded.sessions._sessions
    assert len(sessions) == 2
    expected = model(drawn(0))
    context(drawn(1))
    model.replay()
    assert np.array_equal(first.outputs[0], expected)


def test_threads_with_a_context_each_compute_what_one_alone_does(model: Executable) -> None:
    inputs = [drawn(seed) for seed in range(40)]
    expected = [model(x) for x in inputs]

    def work(_: int) -> None:
        with model.context() as context:
            for x, y in zip(inputs * 5, expected * 5, strict=True):
                assert np.array_equal(context(x), y)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


class _Busy:
    """A context whose run lasts until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        run = CpuBackend.run

        def slow(backend: CpuBackend) -> None:
            self.began.set()
            assert self.go_on.wait(20)
            run(backend)

        monkeypatch.setattr(CpuBackend, "run", slow)


def test_a_context_in_two_threads_is_refused_and_stays_good(model: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model(drawn(0))
    context, busy = model.context(), _Busy(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(context, drawn(0))
        assert busy.began.wait(20)
        for use in (lambda: context(drawn(0)), context.replay, lambda: next(context.steps({"x": drawn(0)}))):
            with pytest.raises(InputError, match=r"at work in another thread: each takes one of its own, context\(\)"):
                use()
        busy.go_on.set()
        assert np.array_equal(running.result(), expected)
    assert np.array_equal(context(drawn(0)), expected)


def test_threads_run_beside_each_other(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call ends when the second one has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    began, ended = threading.Event(), threading.Event()
    run = CpuBackend.run

    def first(backend: CpuBackend) -> None:
        monkeypatch.setattr(CpuBackend, "run", run)
        began.set()
        assert ended.wait(20)
        run(backend)

    with nimblert.load(small) as model:
        expected = [model(drawn(seed)) for seed in (1, 2)]
        for _ in range(2):
            began.clear()
            ended.clear()
            monkeypatch.setattr(CpuBackend, "run", first)
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(model, drawn(1))
                assert began.wait(20)
                assert np.array_equal(model(drawn(2)), expected[1])
                ended.set()
                assert np.array_equal(running.result(), expected[0])
        (idle,) = model._idle
    with pytest.raises(InputError, match="this context is closed: make another one"):
        idle(drawn(0))


def test_concurrent_calls_use_at_most_two_contexts_for_each_core(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    with nimblert.load(small) as model, ThreadPoolExecutor(8) as pool:
        expected, busy = model(drawn(0)), _Busy(monkeypatch)
        runs = [pool.submit(model, drawn(0)) for _ in range(8)]
        assert busy.began.wait(20)
        time.sleep(0.05)
        busy.go_on.set()
        assert all(np.array_equal(run.result(), expected) for run in runs)
        assert 1 <= len(model._idle) <= 4


def test_threads_that_share_an_executable_take_turns_on_one_core(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    model = nimblert.load(small)
    expected = model(drawn(0))
    busy = _Busy(monkeypatch)
    with model, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(model, drawn(0)) for _ in range(2)]
        assert busy.began.wait(20)
        time.sleep(0.05)
        assert not any(run.done() for run in runs)
        busy.go_on.set()
        assert all(np.array_equal(run.result(), expected) for run in runs)


def test_close_waits_for_contexts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nimblert.load(small)
    expected = model(drawn(0))
    context, busy = model.context(), _Busy(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(context, drawn(0))
        assert busy.began.wait(20)
        closing = pool.submit(model.close)
        time.sleep(0.05)
        assert not closing.done()
        busy.go_on.set()
        assert np.array_equal(running.result(), expected)
        closing.result()
    with pytest.raises(InputError, match="this context is closed: make another one"):
        context(drawn(0))
    with pytest.raises(InputError, match="this executable is closed: load the plan again"):
        model.context()


def test_an_arena_serves_plans_that_run_one_after_the_other(small: Path, large: Path) -> None:
    with nimblert.load(small) as alone, nimblert.load(large) as other:
        expected = alone(drawn(0)), other(drawn(0, 32))
        arenas = [model.plan.arena_nbytes for model in (alone, other)]
    with Arena.for_plans(small, large) as arena:
        assert arena.nbytes == max(arenas)
        with nimblert.load(small, arena=arena) as first, nimblert.load(large, arena=arena) as second:
            for _ in range(3):
                assert np.array_equal(first(drawn(0)), expected[0])
                assert np.array_equal(second(drawn(0, 32)), expected[1])
            third = second.context(arena=arena)
            assert np.array_equal(third(drawn(0, 32)), expected[1])


def test_an_arena_in_use_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Arena.for_plans(small) as arena, nimblert.load(small, arena=arena) as model:
        context = model.context(arena=arena)
        steps = context.steps({"x": drawn(0)})
        next(steps)
        with pytest.raises(InputError, match="the arena is in use by another context: run one after the other"):
            model(drawn(0))
        steps.close()
        expected = model(drawn(0))
        busy = _Busy(monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(context, drawn(0))
            assert busy.began.wait(20)
            with pytest.raises(InputError, match="the arena is in use by another context"):
                model(drawn(0))
            busy.go_on.set()
            assert np.array_equal(running.result(), expected)


def test_a_closed_context_gives_its_arena_back(small: Path) -> None:
    """Though a run by steps is half done there."""
    x = {"x": drawn(0)}
    with Arena.for_plans(small) as arena, nimblert.load(small, arena=arena) as model:
        expected = model.run(x)["y"]
        context = model.context(arena=arena)
        steps = context.steps(x)
        next(steps)
        context.close()
        others = model.steps(x)
        next(others)
        with pytest.raises(InputError, match="this context is closed"):
            next(steps)
        with pytest.raises(InputError, match="the arena is in use by another context"):  # still that of `others`
            model.context(arena=arena).run(x)
        others.close()
        assert np.array_equal(model.run(x)["y"], expected)


def test_a_run_in_a_closed_arena_is_refused(small: Path) -> None:
    """On a GPU its memory may be another plan's by then."""
    arena = Arena.for_plans(small)
    with nimblert.load(small, arena=arena) as model:
        model(drawn(0))
        arena.close()
        for run in (lambda: model(drawn(0)), model.replay, model.launch, lambda: next(model.steps({"x": drawn(0)}))):
            with pytest.raises(InputError, match="the arena is closed: make another one"):
                run()


def test_an_arena_that_does_not_serve_is_refused(small: Path, large: Path) -> None:
    with Arena(16, target="cpu") as arena, pytest.raises(InputError, match="has 16 bytes, the plan needs"):
        nimblert.load(large, arena=arena)
    arena = Arena.for_plans(small)
    arena.close()
    with pytest.raises(InputError, match="the arena is closed"):
        nimblert.load(small, arena=arena)
    with pytest.raises(InputError, match="target 'tpu': expected one of"):
        Arena(16, target="tpu")
    for nbytes in (-1, -1000, True, 16.0, "16", None):
        with pytest.raises(InputError, match=rf"^arena: got {nbytes!r} bytes, expected a whole number of at least 0$"):
            Arena(nbytes, target="cpu")  # type: ignore[arg-type] (what is tested)
    assert [Arena(nbytes, target="cpu").memory.nbytes for nbytes in (0, np.uint8(200))] == [0, 200]
    with pytest.raises(InputError, match="one plan or several, all of one target"):
        Arena.for_plans()


def test_a_cpu_plan_has_no_devices(small: Path) -> None:
    with pytest.raises(InputError, match="device 1: a plan for the CPU has no devices to choose from"):
        nimblert.load(small, device=1)


def test_outputs_are_new_given_or_views(model: Executable) -> None:
    first, second = drawn(0), drawn(1)
    expected = model(first), model(second)
    kept = model.run({"x": first})["y"]
    mine = np.zeros((4, WIDTH), np.float32)
    assert model.run({"x": second}, out={"y": mine})["y"] is mine
    assert np.array_equal(mine, expected[1])
    view = model.run({"x": first}, reuse_outputs=True)["y"]
    assert np.array_equal(view, expected[0])
    model(second)
    assert np.array_equal(view, expected[1])
    assert np.array_equal(kept, expected[0])


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ({"z": np.zeros((4, WIDTH), np.float32)}, "out: 'z' is not one of the plan's outputs ['y']"),
        ({"y": [0.0]}, "out 'y': got list, expected a numpy array: use numpy.asarray(value, 'float32')"),
        ({"y": np.ndarray}, "out 'y': got the class ndarray, expected an array"),
        ({"y": np.zeros((4, WIDTH))}, "out 'y': dtype float64, expected float32: give an array of that dtype"),
        ({"y": np.zeros((WIDTH, 4), np.float32)}, f"out 'y': shape ({WIDTH}, 4), expected (4, {WIDTH})"),
        (
            {"y": np.broadcast_to(np.float32(0), (4, WIDTH))},
            "out 'y': the array is read-only: give one that can be written",
        ),
    ],
)
def test_an_array_that_cannot_take_an_output(model: Executable, out: dict[str, np.ndarray], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        model.run({"x": drawn(0)}, out=out)
    assert str(caught.value) == sentence


def test_runs_can_be_awaited(model: Executable) -> None:
    inputs = [drawn(seed) for seed in range(6)]
    expected = [model(x) for x in inputs]

    async def all_of_them() -> list[dict[str, np.ndarray]]:
        contexts = [model.context() for _ in inputs]
        runs = (context.arun({"x": x}) for context, x in zip(contexts, inputs, strict=True))
        return await asyncio.gather(*runs)

    for found, y in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert np.array_equal(found["y"], y)


def test_a_run_is_completed_though_its_task_is_cancelled(model: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, context = model(drawn(0)), model.context()
    busy = _Busy(monkeypatch)

    async def cancelled() -> None:
        task = asyncio.create_task(context.arun({"x": drawn(0)}))
        await asyncio.to_thread(busy.began.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        busy.go_on.set()

    asyncio.run(cancelled())  # waits for the threads of its loop
    last = context.outputs[0]
    assert np.array_equal(context.read(last.pointer, last.span_nbytes), expected.view(np.uint8).reshape(-1))


def test_host_arrays_of_other_libraries_are_taken(model: Executable) -> None:
    torch = pytest.importorskip("torch")
    x = drawn(0)
    assert np.array_equal(model(torch.from_numpy(x)), model(x))
    with pytest.raises(InputError, match=r"input 'x': numpy cannot read it by DLPack"):
        model(torch.from_numpy(x).bfloat16())


def unsharded() -> None:
    """Raise what JAX raises for an array on several devices."""
    raise BufferError("__dlpack__ only supported for unsharded arrays.")


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (lambda: pytest.importorskip("torch").empty(4, 8, device="meta"), r"it does not come by DLPack: [^\n]*"),
        (
            lambda: SimpleNamespace(__dlpack_device__=unsharded),
            r"it does not come by DLPack: __dlpack__ only supported for un.*",
        ),
        (
            lambda: SimpleNamespace(__dlpack_device__=lambda: (2, 3)),
            r"is on GPU 3, the plan runs on the CPU: give a copy on the host, \.cpu\(\) or \.get\(\)",
        ),
    ],
    ids=["no memory", "no device", "on a GPU"],
)
def test_cpu_plan_refuses_array(model: Executable, array: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^input 'x': {sentence}$"):
        model(array())


def test_what_is_bound_is_read_and_written_where_it_is(model: Executable) -> None:
    expected = [model(drawn(seed)) for seed in range(4)]
    x, y = drawn(0), np.zeros((4, WIDTH), np.float32)
    model.bind("x", x)
    assert np.array_equal(model.run({})["y"], expected[0])
    model.bind("y", y)
    for seed in (1, 2):
        x[...] = drawn(seed)
        assert model.run({})["y"] is y
        assert np.array_equal(y, expected[seed])
    assert [type(work).__name__ for work in model.steps({})][-1] == "Launch"
    x[...] = drawn(3)
    model.launch()
    model.synchronize()
    assert np.array_equal(y, expected[3])
    model.bind("x", None)
    assert model(drawn(0)) is y
    model.bind("y", None)
    assert np.array_equal(model(drawn(1)), expected[1])
    assert np.array_equal(y, expected[0])


def test_what_cannot_be_bound_is_a_sentence(model: Executable) -> None:
    x, read_only = drawn(0), drawn(1)
    read_only.flags.writeable = False
    for name, array, sentence in (
        ("x", x[:2], r"bind 'x': shape \(2, 64\), expected \(4, 64\)"),
        ("x", np.asfortranarray(x), r"bind 'x': strides \(4, 16\) in bytes, expected \(256, 4\)"),
        ("y", read_only, "bind 'y': the array is read-only"),
        ("y", None, "bind: nothing is bound to 'y'"),
    ):
        with pytest.raises(InputError, match=sentence):
            model.bind(name, array)
    model.bind("x", read_only)
    with pytest.raises(InputError, match="bind 'y': shares memory with what 'x' is bound to"):
        model.bind("y", read_only.base if read_only.base is not None else writeable(read_only))
    with pytest.raises(InputError, match="stream: a plan for the CPU takes none"):
        model.launch(0)
    with pytest.raises(InputError, match="stream: a plan for the CPU takes none"):
        model.run({}, stream=0)


def writeable(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = True
    return array
