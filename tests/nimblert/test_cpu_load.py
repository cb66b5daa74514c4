"""CPU plans under load: many loads at once, callers that share one executable, hundreds of loads and closings."""

import gc
import json
import shutil
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import memory_use
import numpy as np
import pytest
from concurrency import at_once, thread_count, threads_beyond
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from subprocesses import python

import nimblec
import nimblert
from nimblec.plan import encoder
from nimblert.errors import InputError
from nimblert.executable import Executable

LOADERS, CALLERS, CALLS, LOADS = 32, 8, 25, 60
WIDTH = 512
SLACK_NBYTES = 8 << 20
PYTHON_SLACK_NBYTES = 256 << 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write (x @ v) * tanh(x @ w) as a plan of two streams; v and w are 1 MiB each."""
    folder = tmp_path_factory.mktemp("load")
    rng = np.random.default_rng(0)
    node = helper.make_node
    write_model(
        folder / "model.onnx",
        [
            node("MatMul", ["x", "v"], ["a"]),
            node("MatMul", ["x", "w"], ["b"]),
            node("Tanh", ["b"], ["c"]),
            node("Mul", ["a", "c"], ["y"]),
        ],
        [floats("x", 4, WIDTH)],
        [floats("y", 4, WIDTH)],
        constants={name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "vw"},
    )
    plan = plan_file(folder / "model.onnx", streams=None)
    assert plan.programs[0].stream_count == 2
    encoder.write(plan, folder / "model.plan")
    return folder / "model.plan"


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions start threads of their own, on machines with few cores too."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, WIDTH)).astype(np.float32)


def result_of(path: Path, x: np.ndarray) -> bytes:
    with nimblert.load(path) as executable:
        return executable.run({"x": x})["y"].tobytes()


def open_file_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_threads_that_load_one_file_at_once_compute_the_same(path: Path) -> None:
    expected = [result_of(path, drawn(i)) for i in range(LOADERS)]
    assert at_once(LOADERS, lambda i: result_of(path, drawn(i))) == expected


def test_loads_of_one_file_share_its_map_and_its_sessions(path: Path) -> None:
    x = drawn(0)
    with nimblert.load(path) as first, nimblert.load(path) as second, nimblert.load(path, threads=1) as other:
        assert first.plan.weights[0].data.obj is second.plan.weights[0].data.obj
        assert sessions_of(first) == sessions_of(second) != sessions_of(other)
        expected = first(x)
        first.close()
        np.testing.assert_array_equal(second(x), expected)
    again = path.with_name("again.plan")
    shutil.copy(path, again)
    with nimblert.load(path) as first, nimblert.load(again) as other:
        assert sessions_of(first) != sessions_of(other)


def sessions_of(executable: Executable) -> set[int]:
    resident: Any = executable._loaded
    return {id(opened.session) for opened in resident.sessions._sessions.values()}


def test_four_loads_take_the_memory_of_one(tmp_path: Path) -> None:
    """Of which packed copies of weights are the most."""
    width = 2048
    weights = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    write_model(tmp_path / "m.onnx", [node], [floats("x", 4, width)], [floats("y", 4, width)], constants={"w": weights})
    encoder.write(plan_file(tmp_path / "m.onnx"), tmp_path / "m.plan")
    x = np.ones((4, width), np.float32)
    loaded = [nimblert.load(tmp_path / "m.plan")]
    loaded[0](x)
    resident = memory_use.current().resident
    for _ in range(3):
        loaded.append(nimblert.load(tmp_path / "m.plan"))
        loaded[-1](x)
    assert memory_use.current().resident - resident < weights.nbytes / 2
    for executable in loaded:
        executable.close()


FORKED = """
import os, sys, numpy as np, nimblert
x = np.ones((4, 512), np.float32)
with nimblert.load(sys.argv[1]) as model:
    expected = model(x)
    child = os.fork()
    if not child:
        with nimblert.load(sys.argv[1]) as model:
            os._exit(0 if np.array_equal(model(x), expected) else 1)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_shares_no_session_of_its_parent(path: Path) -> None:
    """Whose threads it has not."""
    assert python(FORKED, path).split() == ["0"]


def test_threads_share_one_executable(path: Path) -> None:
    expected = [result_of(path, drawn(i)) for i in range(CALLERS)]
    assert len(set(expected)) == CALLERS
    with nimblert.load(path) as executable:

        def call(index: int) -> set[bytes]:
            x = drawn(index)
            return {executable.run({"x": x})["y"].tobytes() for _ in range(CALLS)}

        results = at_once(CALLERS, call)
    assert results == [{e} for e in expected]


def test_closing_while_others_call_ends_their_calls_in_a_sentence(path: Path) -> None:
    expected = result_of(path, drawn(0))
    executable = nimblert.load(path)
    started = threading.Barrier(CALLERS + 1, timeout=60)

    def call(_: int) -> str:
        started.wait()
        try:
            while True:
                assert executable.run({"x": drawn(0)})["y"].tobytes() == expected
        except InputError as exc:
            return str(exc)

    with ThreadPoolExecutor(CALLERS) as pool:
        callers = [pool.submit(call, i) for i in range(CALLERS)]
        started.wait()
        executable.close()
        messages = {caller.result(timeout=60) for caller in callers}
    assert messages == {"this executable is closed: load the plan again"}


def leave(path: Path) -> tuple[int, int, int, int]:
    """Load and close often: threads, open files and resident bytes that are left, and threads while loaded."""
    x = drawn(0)
    for _ in range(20):
        result_of(path, x)
    with nimblert.load(path):
        loaded = thread_count()
    threads, files, resident = thread_count(), open_file_count(), memory_use.current().resident
    for _ in range(LOADS):
        result_of(path, x)
    lost = memory_use.current().resident - resident
    return threads_beyond(threads), open_file_count() - files, lost, loaded


LEAVE = """
import os, sys
from pathlib import Path
sys.path[:0] = ["tests/support", "tests/nimblert"]
os.sched_getaffinity = lambda _: set(range(8))
from test_cpu_load import leave
print(*leave(Path(sys.argv[1])))
"""


def test_loading_and_closing_leaves_nothing_behind(path: Path) -> None:
    """In a process that has run no other test, whose memory may come or go meanwhile."""
    threads, files, lost, loaded = map(int, python(LEAVE, path).split())
    assert loaded > 6  # three of each product's session
    assert threads == 0
    assert files == 0
    assert lost <= SLACK_NBYTES
    assert LOADS * path.stat().st_size > 4 * SLACK_NBYTES  # so that a plan not given back would show


def test_loading_and_closing_leaves_no_python_objects_behind(path: Path) -> None:
    x = drawn(0)
    result_of(path, x)
    tracemalloc.start()
    try:
        for _ in range(5):
            result_of(path, x)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(LOADS // 4):
            result_of(path, x)
        gc.collect()
        lost = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert lost <= PYTHON_SLACK_NBYTES


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("runs", "closes"), [(0, True), (1, True), (1, False)])
def test_sessions_are_given_back_without_the_garbage_collector(path: Path, runs: int, *, closes: bool) -> None:
    executable = nimblert.load(path)
    for _ in range(runs):
        executable.run({"x": drawn(0)})
    backend: Any = executable._backends[executable.program.name]
    calls = [weakref.ref(step) for _, step in backend._streams._own]  # of sessions, which take no weakref
    workers = [worker._thread for worker in backend._streams._workers]
    if closes:
        executable.close()
    del backend, executable
    for worker in workers:
        worker.join()
    assert [call for call in calls if call()] == []


FAILING = """
import os, sys
sys.path[:0] = ["tests/support"]
import numpy as np
import nimblert, nimblert.cpu.backend
from concurrency import thread_count, threads_beyond
from nimblert.errors import InputError

os.sched_getaffinity = lambda _: set(range(8))

def refuse(*_):
    raise InputError("no")

with nimblert.load(sys.argv[1]) as executable:
    executable(np.zeros((4, 512), np.float32))
before, failed = thread_count(), 0
nimblert.cpu.backend.partial = refuse
for _ in range(5):
    try:
        nimblert.load(sys.argv[1])
    except InputError as exc:
        failed += str(exc) == "no"
print(failed, threads_beyond(before))
"""


A_LIBRARY_PRINTS = """
import io, os, sys
from nimblert import golden, replay
draw_inputs = golden.draw_inputs
golden.draw_inputs = lambda *given: (os.write(1, b"drawn"), draw_inputs(*given))[1]
sys.stdin = io.TextIOWrapper(io.BytesIO(sys.argv[1].encode()))
sys.exit(replay.main("cpu"))
"""


def test_what_libraries_print_is_not_in_the_answer_of_a_check(path: Path, tmp_path: Path) -> None:
    nimblec.compile(path.with_name("model.onnx"), target="cpu").save(tmp_path / "golden.plan")
    (output,) = json.loads(python(A_LIBRARY_PRINTS, tmp_path / "golden.plan"))["outputs"]
    assert output["repeat"] == "bit-exact"


def test_a_load_that_fails_leaves_no_threads(path: Path) -> None:
    """In a process that no other test has started threads in, which may end meanwhile."""
    assert python(FAILING, path).split() == ["5", "0"]
