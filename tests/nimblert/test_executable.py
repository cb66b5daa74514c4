"""What a user may do to a loaded plan: sources, inputs, half-done runs, reads, forks, the end of the process."""

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from copy import copy as shallow
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from plans import cpu_plan
from subprocesses import python

import nimblert
from nimblec.plan import encoder
from nimblert import Limits
from nimblert.check.verify import read_plan
from nimblert.errors import InputError, PlanError, PlanFormatError, PlanInvalidError
from nimblert.executable import Executable
from nimblert.plan import Plan, Pointer, Region, container

WIDTH = 256
X = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
node = helper.make_node


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tanh(x @ v) * (x @ w) as a plan of one stream and as one of two; the weights fill pages."""
    folder = tmp_path_factory.mktemp("executable")
    rng = np.random.default_rng(1)
    path = write_model(
        folder / "model.onnx",
        [
            node("MatMul", ["x", "v"], ["a"]),
            node("MatMul", ["x", "w"], ["b"]),
            node("Tanh", ["a"], ["c"]),
            node("Mul", ["b", "c"], ["y"]),
        ],
        [floats("x", 4, WIDTH)],
        [floats("y", 4, WIDTH)],
        constants={name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "vw"},
    )
    for name, streams in (("one", 1), ("two", None)):
        plan = plan_file(path, streams=streams)
        assert plan.programs[0].stream_count == (streams or 2)
        encoder.write(plan, folder / f"{name}.plan")
    return folder


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "two.plan"


@pytest.fixture
def model(path: Path) -> Iterator[Executable]:
    with nimblert.load(path) as executable:
        yield executable


def test_a_plan_comes_by_path_by_bytes_or_as_it_is(path: Path, model: Executable) -> None:
    expected = model(X)
    content = path.read_bytes()
    words = memoryview(np.frombuffer(content[: len(content) // 8 * 8], np.uint64))
    assert words.nbytes == len(content)
    sources = (str(path), path, content, bytearray(content), memoryview(content), words, read_plan(content))
    for source in sources:
        for copy in (False, True):
            with nimblert.load(source, copy=copy) as executable:
                np.testing.assert_array_equal(executable(X), expected)


@pytest.mark.parametrize("again", [shallow, deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])  # noqa: S301 - ours
def test_a_plan_is_copied_and_pickled_as_its_file(model: Executable, again: Callable[[Plan], Plan]) -> None:
    with nimblert.load(again(model.plan)) as other:
        np.testing.assert_array_equal(other(X), model(X))


@pytest.mark.parametrize("again", [shallow, deepcopy, pickle.dumps])
def test_what_is_loaded_has_no_copies(model: Executable, again: Callable[[object], object]) -> None:
    """A copy would close what the original runs on."""
    for held, noun in ((model, "executable"), (model.context(), "context")):
        with pytest.raises(InputError, match=f"a copy of this {noun} cannot be made, nor a pickle: load the plan"):
            again(held)


@pytest.mark.parametrize("name", ["limits", "arena"])
def test_limits_and_arenas_are_what_they_say(path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: got int, expected a nimblert\.{name.title()}"):
        nimblert.load(path, **{name: 3})


@pytest.mark.parametrize("limit", [float("nan"), 1.5, None, "1", True, -1])
def test_limits_are_whole_numbers(limit: Any) -> None:
    with pytest.raises(InputError, match=rf"^limits: kernels is {limit!r}, expected a whole number of at least 0$"):
        Limits(kernels=limit)
    assert Limits(kernels=0, programs=np.int64(2)).programs == 2  # type: ignore[arg-type] (what is tested)


def test_bytes_that_change_later_do_not_change_the_plan(path: Path, model: Executable) -> None:
    content = bytearray(path.read_bytes())
    with nimblert.load(content) as executable:
        content[:] = bytes(len(content))
        np.testing.assert_array_equal(executable(X), model(X))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "plan: is not a plan file"),
        (bytearray(b"PK\x03\x04" + bytes(100)), "plan: is not a plan file, it looks like a zip archive"),
        (memoryview(bytes(4) + b"NPLN" + bytes(100)), "plan: the end of its 108 bytes is missing or damaged"),
    ],
)
def test_bytes_that_are_no_plan(source: container.Source, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        nimblert.load(source)


@pytest.mark.parametrize("source", [None, 7, ["a.plan"], np.zeros(3)], ids=["None", "int", "list", "array"])
def test_what_is_no_plan_at_all(source: object) -> None:
    with pytest.raises(InputError, match=f"plan: got {type(source).__name__}, expected the path of a plan file"):
        nimblert.load(source)  # type: ignore[arg-type]


def test_paths_that_lead_to_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    paths = {
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "socket": "cannot be read",
        Path("/dev/zero"): "is not a regular file",
        tmp_path: "is a directory",
        "a\0b": "null byte",
    }
    for source, message in paths.items():
        for copy in (False, True):
            with pytest.raises(PlanError, match=message):
                nimblert.load(source, copy=copy)


OVERWRITTEN = """
import os, sys, numpy as np, nimblert
path = sys.argv[1]
model = nimblert.load(path, copy=True)
x = np.ones(model.inputs[0].shape, np.float32)
expected = model(x)
with open(path, "r+b") as file:
    file.write(bytes(os.path.getsize(path)))
assert np.array_equal(model(x), expected)
os.truncate(path, 100)
assert np.array_equal(model(x), expected)
"""


def test_a_copy_outlives_its_file(tmp_path: Path) -> None:
    """Add reads its weights where they lie; ONNX Runtime packs those of products."""
    weights = np.random.default_rng(0).random((256, 256), np.float32)
    x, y = (floats(name, 256, 256) for name in "xy")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    model = write_model(tmp_path / "model.onnx", [node], [x], [y], constants={"w": weights})
    encoder.write(plan_file(model), tmp_path / "model.plan")
    python(OVERWRITTEN, tmp_path / "model.plan")


def test_weights_of_a_copy_are_used_where_they_were_read(path: Path) -> None:
    for source in (path, path.read_bytes()):
        with nimblert.load(source, copy=True) as executable:
            weight = executable.plan.weights[0]
            memory = executable._backends[executable.program.name].memory
            held = memory.range(Pointer(region=Region.WEIGHTS, offset=weight.offset), 4)
            assert held.ctypes.data == np.frombuffer(weight.data, np.uint8).ctypes.data


def test_a_masked_array_is_refused(model: Executable) -> None:
    with pytest.raises(InputError, match=r"input 'x': plans have no masks: .*\.filled\(0\)"):
        model(np.ma.masked_invalid(X))


def test_a_run_beside_a_half_done_one_is_refused(model: Executable) -> None:
    expected = model(X)
    steps = model.steps({"x": X})
    next(steps)
    for attempt in (lambda: model(X), model.replay, lambda: next(model.steps({"x": X}))):
        with pytest.raises(InputError, match=r"a run by steps\(\) is half done: exhaust it or close it first"):
            attempt()
    assert len(list(steps)) == len([c for c in model.program.commands if hasattr(c, "op")]) - 1
    np.testing.assert_array_equal(model.read(model.outputs[0].pointer, X.nbytes).view(np.float32), expected.ravel())
    np.testing.assert_array_equal(model(X), expected)


def test_a_half_done_run_that_is_closed_or_dropped_is_over(model: Executable) -> None:
    expected = model(X)
    steps = model.steps({"x": X})
    next(steps)
    steps.close()
    np.testing.assert_array_equal(model(X), expected)
    steps = model.steps({"x": X})
    next(steps)
    del steps
    np.testing.assert_array_equal(model(X), expected)


def test_closing_ends_a_half_done_run(path: Path) -> None:
    model = nimblert.load(path)
    steps = model.steps({"x": X})
    next(steps)
    model.close()
    with pytest.raises(InputError, match="this executable is closed"):
        next(steps)
    with pytest.raises(InputError, match="this executable is closed"):
        model.read(Pointer(region=Region.ARENA), 1)


@pytest.mark.parametrize(
    ("pointer", "nbytes"),
    [
        (Pointer(region=Region.INPUT), X.nbytes + 1),
        (Pointer(region=Region.INPUT, offset=-1), 1),
        (Pointer(region=Region.INPUT, offset=8), -1),
        (Pointer(region=Region.WEIGHTS), 1 << 60),
    ],
)
def test_only_what_a_region_holds_can_be_read(model: Executable, pointer: Pointer, nbytes: int) -> None:
    with pytest.raises(InputError, match=rf"read: {nbytes} bytes at {pointer.offset} lie outside"):
        model.read(pointer, nbytes)
    with pytest.raises(InputError, match=r"read: the program has no region INPUT\(1\)"):
        model.read(Pointer(region=Region.INPUT, index=1), 1)
    assert model.read(Pointer(region=Region.INPUT, offset=X.nbytes), 0).size == 0


def test_bytes_between_weights_cannot_be_read() -> None:
    plan = cpu_plan()
    with nimblert.load(plan) as model:
        with pytest.raises(InputError, match=r"read: weights\(0\): bytes 0 to \d+ are outside it"):
            model.read(Pointer(region=Region.WEIGHTS), plan.weights_nbytes)
        for weight in plan.weights:
            found = model.read(Pointer(region=Region.WEIGHTS, offset=weight.offset), weight.data.nbytes)
            assert found.tobytes() == weight.data.tobytes()


FORKED = """
import os, sys, numpy as np, nimblert
os.sched_getaffinity = lambda _: set(range(8))  # sessions with threads of their own
model = nimblert.load(sys.argv[1])
x = np.ones(model.inputs[0].shape, np.float32)
expected = model(x)
sys.stdout.flush()
child = os.fork()
if child == 0:
    if sys.argv[2] == "use":
        for use in (lambda: model(x), model.replay, lambda: next(model.steps({"x": x}))):
            try:
                use()
            except nimblert.InputError as exc:
                print(str(exc).replace(str(os.getppid()), "N"))
        model.close()
        with nimblert.load(sys.argv[1]) as again:
            assert np.array_equal(again(x), expected)
    del model
    sys.exit(0)
print("child", os.waitpid(child, 0)[1])
assert np.array_equal(model(x), expected)
"""


@pytest.mark.parametrize("plan", ["one", "two"])
@pytest.mark.parametrize("what", ["use", "drop"])
def test_a_forked_process_has_to_load_again(folder: Path, plan: str, what: str) -> None:
    printed = python(FORKED, folder / f"{plan}.plan", what, timeout=60).splitlines()
    sentence = "this executable was loaded in process N: load the plan again in this one"
    assert printed == [sentence] * (3 if what == "use" else 0) + ["child 0"]


def test_limits_hold_before_anything_is_allocated(path: Path) -> None:
    plan = read_plan(path)
    huge = replace(plan, programs=(replace(plan.programs[0], arena_nbytes=1 << 46),))
    with pytest.raises(PlanInvalidError, match=r"memory: .* bytes, the limit is"):
        nimblert.load(huge)
