"""Arrays of the caller in place of a program's own memory: whatever becomes of them, no other byte is touched."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from programs import bare, planned

import nimblert
from nimblert import Executable
from nimblert.errors import InputError
from nimblert.plan import Memcpy, Pointer, Region, Tensor

SHAPE = (4, 8)
node = helper.make_node


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Executable]:
    """Yield a model of y = relu(x) and z = -relu(x), and the number s, the sum of all of y."""
    nodes = [node("Relu", ["x"], ["y"]), node("Neg", ["y"], ["z"]), node("ReduceSum", ["y"], ["s"], keepdims=0)]
    path = write_model(
        tmp_path / "three.onnx", nodes, [floats("x", *SHAPE)], [floats("y", *SHAPE), floats("z", *SHAPE), floats("s")]
    )
    with nimblert.load(plan_file(path)) as executable:
        yield executable


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


@pytest.mark.parametrize("strides", [(5, 1), (1, 4)])
def test_an_empty_input_can_be_bound(strides: tuple[int, int]) -> None:
    """In C order, and in the other."""
    source, target = (
        Tensor(name=name, dtype="float32", shape=(4, 5), strides=strides, pointer=Pointer(region=region))
        for name, region in (("x", Region.INPUT), ("y", Region.OUTPUT))
    )
    copy = Memcpy(dst=target.pointer, src=source.pointer, nbytes=source.span_nbytes, stream=0, op=0)
    nbytes = {"input_nbytes": (copy.nbytes,), "output_nbytes": (copy.nbytes,)}
    program = planned(copy, inputs=(source,), outputs=(target,), **nbytes)
    with nimblert.load(bare(program)) as model:
        x = model.empty_input("x")
        assert x.strides == tuple(4 * stride for stride in strides)
        model.bind("x", x)
        for seed in range(3):
            x[...] = np.random.default_rng(seed).standard_normal((4, 5))
            assert np.array_equal(model(), x)


def resized(array: np.ndarray) -> None:
    """Let numpy move the memory of an array, which it does where it is told not to count references."""
    array.resize((400, 400), refcheck=False)


def shrunk(array: np.ndarray) -> None:
    array.resize((1, 8), refcheck=False)


@pytest.mark.parametrize("change", [resized, shrunk])
@pytest.mark.parametrize("name", ["x", "y"])
def test_binding_refuses_changed_array(model: Executable, name: str, change: Callable[[np.ndarray], None]) -> None:
    given = {} if name == "x" else {"x": drawn(0)}
    array = drawn(0)
    model.bind(name, array)
    expected = np.maximum(drawn(0), 0)
    assert np.array_equal(model.run(given)["y"], expected)
    change(array)
    for run in (model.launch, model.replay, lambda: model.run(given), lambda: next(model.steps(given))):
        with pytest.raises(InputError, match=rf"'{name}': its array was moved or resized since"):
            run()
    model.bind(name, None)
    assert np.array_equal(model(drawn(0))[0], expected)


def test_binding_refuses_moved_tensor(model: Executable) -> None:
    torch = pytest.importorskip("torch")
    tensor, other = torch.zeros(SHAPE), torch.zeros(SHAPE)  # both now: a later one may lie where the first has lain
    model.bind("y", tensor)
    assert model.run({"x": drawn(0)})["y"] is tensor
    for move in (lambda: tensor.resize_(1000, 1000), lambda: tensor.set_(other)):
        move()
        with pytest.raises(InputError, match="'y': its array was moved or resized since"):
            model.run({"x": drawn(0)})
    model.bind("y", tensor)
    model.run({"x": drawn(1)})
    assert np.array_equal(tensor.numpy(), np.maximum(drawn(1), 0))


def test_a_name_of_an_input_and_an_output_cannot_be_bound(tmp_path: Path) -> None:
    x = floats("x", *SHAPE)
    path = write_model(tmp_path / "same.onnx", [node("Neg", ["x"], ["y"])], [x], [floats("y", *SHAPE), x])
    with nimblert.load(plan_file(path)) as model:
        with pytest.raises(InputError, match=r"^bind 'x': an input and an output have this name: give their arrays"):
            model.bind("x", drawn(0))
        model.bind("y", y := drawn(1))
        out = np.zeros(SHAPE, np.float32)
        assert model.run({"x": drawn(0)}, out={"x": out})["x"] is out
        assert np.array_equal(out, -y)


def test_an_input_may_be_called_self(tmp_path: Path) -> None:
    path = write_model(tmp_path / "own.onnx", [node("Neg", ["self"], ["y"])], [floats("self", 2)], [floats("y", 2)])
    given = np.ones(2, np.float32)
    with nimblert.load(plan_file(path)) as model:
        for call in (model, model.context(), model.entry()):
            assert np.array_equal(call(self=given), -given)


@pytest.mark.parametrize("name", ["x", "z"])
def test_memory_of_another_output_cannot_be_bound(model: Executable, name: str) -> None:
    x = drawn(0)
    expected = [array.copy() for array in model(x)]
    kept = model.run({"x": x}, reuse_outputs=True)["y"]
    with pytest.raises(InputError, match=rf"bind '{name}': shares memory with the plan's own for 'y': bind a copy"):
        model.bind(name, kept)
    model.bind("y", kept)  # its own place
    assert all(np.array_equal(a, b) for a, b in zip(model(x), expected, strict=True))


def test_what_is_no_memory_of_the_caller_takes_no_output(model: Executable) -> None:
    x, number = drawn(0), np.float32(0)
    with pytest.raises(InputError, match=r"bind 's': got float32, a number without memory of its own, expected an arr"):
        model.bind("s", number)
    with pytest.raises(InputError, match=r"out 's': got float32, a number without memory of its own, expected an arr"):
        model.run({"x": x}, out={"s": number})
    taken = np.zeros((), np.float32)
    assert model.run({"x": x}, out={"s": taken})["s"] is taken
    model.bind("s", bound := np.zeros((), np.float32))
    model.run({"x": x})
    assert taken == bound == model(x)[2] != 0


@pytest.mark.parametrize("names", ["xy", "yx", "yz"])
def test_bind_refuses_memory_of_another_bound_array(model: Executable, names: str) -> None:
    """Whichever comes first: a kernel would write what it, or another one, still reads."""
    room = np.zeros((6, 8), np.float32)
    first, second = names
    model.bind(first, room[:4])
    with pytest.raises(InputError, match=f"bind '{second}': shares memory with what '{first}' is bound to"):
        model.bind(second, room[2:])


def test_arrays_are_given_by_name(model: Executable) -> None:
    array = np.zeros(SHAPE, np.float32)
    for out, kind in (([array], "list"), (array, "ndarray")):
        with pytest.raises(InputError, match=f"out: got {kind}, expected a dict of arrays by output name"):
            model.run({"x": drawn(0)}, out=out)  # type: ignore[arg-type] (what is tested)
    with pytest.raises(InputError, match="state: got list, expected a dict of arrays by name"):
        model.state.update([drawn(0)])  # type: ignore[arg-type] (what is tested)


def test_outputs_share_no_memory_of_the_caller(model: Executable) -> None:
    x, room = drawn(0), np.zeros((6, 8), np.float32)
    for out in ({"y": room[:4], "z": room[1:5]}, {"z": room[:4], "y": room[:4]}):
        with pytest.raises(InputError, match=r"out '[yz]': shares memory with what '[yz]' is written into"):
            model.run({"x": x}, out=out)
    every_row_one = np.lib.stride_tricks.as_strided(room[0].copy(), SHAPE, (0, 4))
    with pytest.raises(InputError, match="out 'y': elements of the array share memory"):
        model.run({"x": x}, out={"y": every_row_one})
    columns = np.zeros((4, 16), np.float32)
    expected = model.run({"x": x})
    results = model.run({"x": x}, out={"y": columns[:, ::-2], "z": columns[:, ::2]})
    assert all(np.array_equal(results[name], expected[name]) for name in "yz")


def test_memory_that_a_run_writes_takes_no_other_output(model: Executable) -> None:
    """Neither the plan's own nor a bound array; the output that is written there may be asked for, too."""
    x = drawn(0)
    expected = model.run({"x": x})

    def check(memory: np.ndarray) -> None:
        for out in ({"y": memory}, {"y": memory, "z": np.zeros(SHAPE, np.float32)}, {"s": memory[0, 3:4].reshape(())}):
            with pytest.raises(InputError, match=r"out '[ys]': shares memory with what 'z' is written into: give it"):
                model.run({"x": x}, out=out)
        results = model.run({"x": x}, out={"z": memory})
        assert results["z"] is memory
        assert all(np.array_equal(results[name], expected[name]) for name in "yzs")

    check(model.run({"x": x}, reuse_outputs=True)["z"])
    model.bind("z", bound := np.zeros(SHAPE, np.float32))
    check(bound)


def test_an_output_may_be_written_over_a_bound_input(model: Executable) -> None:
    """Once the run has read it, as over an input that was given."""
    expected = model.run({"x": drawn(0)})
    for given in (False, True):
        x = drawn(0)
        if not given:
            model.bind("x", x)
        results = model.run({"x": x} if given else {}, out={"y": x})
        assert all(np.array_equal(results[name], expected[name]) for name in "yzs")
        if not given:
            model.bind("x", None)
