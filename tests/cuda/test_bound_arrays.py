"""Arrays that are bound to a program on a GPU, which reads and writes them where they are.

Most tests run on a driver of host memory, too, where tensors of the CPU are said to be on the GPU.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Executable, InputError

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")


def laid_out_for(model: Executable, tensor: Any) -> Any:
    """Return the same tensor with the strides that the plan reads."""
    made = torch.empty_strided(SHAPE, model.inputs[0].strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def test_what_is_bound_is_read_and_written_where_it_is(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x, y = (laid_out_for(model, put(drawn(seed))) for seed in (0, 1))
    model.bind("x", x)
    assert torch.equal(torch.from_dlpack(model.run({})["y"]), x)
    model.bind("y", y)
    for seed in (2, 3):
        x.copy_(put(drawn(seed)))
        assert model.run({})["y"] is y
        assert torch.equal(y, x)
    x.copy_(put(drawn(4)))
    torch_synchronize(x)
    model.launch()
    model.synchronize()
    assert torch.equal(y, x)
    model.bind("x", None)
    assert model(drawn(5)) is y
    assert np.array_equal(y.cpu().numpy(), drawn(5))
    model.bind("y", None)
    assert np.array_equal(model(drawn(6)), drawn(6))
    assert np.array_equal(y.cpu().numpy(), drawn(5))


def test_a_bound_output_may_also_go_to_an_array(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    """Which gets what the run has written, not what the program's own memory holds."""
    y = laid_out_for(model, put(drawn(0)))
    model.bind("y", y)
    for seed, mine in ((1, np.zeros(SHAPE, np.float32)), (2, put(np.zeros(SHAPE, np.float32)))):
        assert model.run({"x": drawn(seed)}, out={"y": mine})["y"] is mine
        for array in (mine, y):
            assert np.array_equal(torch.as_tensor(array).cpu().numpy(), drawn(seed))


@on_host
def test_a_run_waits_for_what_still_uses_a_bound_output(put: Callable[[np.ndarray], Any], host: HostDriver) -> None:
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        y = put(drawn(0))
        interface = {"version": 3, "shape": SHAPE, "typestr": "<f4", "data": (y.data_ptr(), False), "stream": 0x99}
        model.bind("y", SimpleNamespace(__cuda_array_interface__=interface))
        host.waits.clear()
        model.run({"x": drawn(1)})
        model.run({"x": drawn(2)}, stream=0x77)
        (first, _), *_ = host.waits
        assert host.waits == [(first, 0x99), (0x77, 0x99)]


def test_bound_empty_output_is_written_on_the_host(put: object, model: Executable) -> None:
    """Other threads may read it before the run has ended."""
    del put
    y = model.empty_output("y")
    model.bind("y", y)
    for seed in (1, 2):
        assert model(drawn(seed)) is y
        assert np.array_equal(y, drawn(seed))
    with pytest.raises(InputError, match="bind 'y': the array is on the host: give one on the GPU, or one that empty_"):
        model.bind("y", y.copy(order="K"))
    assert model(drawn(3)) is y
    with pytest.raises(InputError, match=r"output 'z': not found, the entry has \['y'\]"):
        model.empty_output("z")
    model.bind("y", None)
    del y
    gc.collect()


def torch_synchronize(tensor: Any) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def test_what_cannot_be_bound_is_a_sentence(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x = laid_out_for(model, put(drawn(0)))
    wide = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)
    odd = wide[1 : x.numel() + 1].as_strided(SHAPE, model.inputs[0].strides)
    for name, array, sentence in (
        ("z", x, r"bind: 'z' is not one of the plan's inputs and outputs \['x', 'y'\]"),
        ("x", x[:2], r"bind 'x': shape \(2, 3, 32, 24\), expected \(4, 3, 32, 24\)"),
        ("x", x.double(), "bind 'x': dtype float64, expected float32"),
        ("x", x.flip(0)[:, :, :, :1].expand(SHAPE), "bind 'x': strides .* in elements, expected"),
        ("y", odd, "bind 'y': address .*, expected a multiple of 16: give an array with memory of its own"),
        ("y", None, "bind: nothing is bound to 'y'"),
    ):
        with pytest.raises(InputError, match=sentence):
            model.bind(name, array)
    model.bind("x", x)
    with pytest.raises(InputError, match="bind 'y': shares memory with what 'x' is bound to"):
        model.bind("y", x)
    with pytest.raises(InputError, match="input 'x' is bound: write into its array, or bind it to None first"):
        model(drawn(1))
    assert torch.equal(torch.from_dlpack(model.run({})["y"]), x)


@on_host
@pytest.mark.parametrize("name", ["x", "y"])
def test_bind_refuses_a_layout_with_gaps(put: Callable[[np.ndarray], Any], name: str) -> None:
    """The program copies whole memories: it would read and write the caller's memory between the rows."""
    plan = copying((5, 8), (0, 1))
    (program,) = plan.programs
    x, y = (replace(tensor, shape=(5, 4)) for tensor in (*program.inputs, *program.outputs))
    nbytes = (x.span_nbytes,)
    gapped = replace(program, inputs=(x,), outputs=(y,), input_nbytes=nbytes, output_nbytes=nbytes, commands=())
    wide = put(np.zeros((5, 8), np.float32))
    sentence = rf"bind '{name}': the plan's layout, strides \(8, 1\), has gaps, .*: give the array with each run"
    with nimblert.load(replace(plan, programs=(gapped,))) as model, pytest.raises(InputError, match=sentence):
        model.bind(name, wide[:, :4])


def test_memory_of_an_output_cannot_be_bound_to_an_input(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    kept = model.run({"x": put(drawn(0))}, reuse_outputs=True)["y"]
    with pytest.raises(InputError, match="bind 'x': shares memory with the plan's own for 'y': bind a copy"):
        model.bind("x", kept)
    model.bind("y", kept)  # its own place
    x = put(drawn(1))
    assert torch.equal(torch.from_dlpack(model.run({"x": x})["y"]), x)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor, _: tensor.t_(),
        lambda tensor, _: tensor.resize_(4, 8),
        lambda tensor, _: tensor.resize_(100, 100),
        lambda tensor, _: tensor.unsqueeze_(0),
        lambda tensor, _: tensor.untyped_storage().resize_(0),
        lambda tensor, other: tensor.set_(other),
        lambda tensor, other: setattr(tensor, "data", other),
    ],
    ids=["transposed", "smaller", "larger", "of another rank", "without memory", "elsewhere", "other data"],
)
def test_bound_tensor_change_is_refused(put: Callable[[np.ndarray], Any], change: Callable[[Any, Any], object]) -> None:
    x, other = (put(drawn(seed, (8, 8))).clone() for seed in range(2))  # numpy's memory cannot be resized
    with nimblert.load(copying((8, 8), (0, 1))) as model:
        model.bind("x", x)
        model.launch()
        model.synchronize()
        change(x, other)
        for run in (model.launch, model.launch, model.replay, lambda: model.run({})):
            with pytest.raises(InputError, match="'x': its array was moved or resized since it was bound: bind it ag"):
                run()
        model.bind("x", other)
        assert torch.equal(torch.from_dlpack(model.run({})["y"]), other)


def test_bound_tensor_may_return_to_its_shape(put: Callable[[np.ndarray], Any]) -> None:
    """PyTorch then stores a shape of more than five axes elsewhere."""
    shape = (2, 1, 2, 1, 2, 2)
    x = put(drawn(0, shape))
    with nimblert.load(copying(shape, range(6))) as model:
        model.bind("x", x)
        for _ in range(3):
            model.launch()
            x.unsqueeze_(0).squeeze_(0)
        assert torch.equal(torch.from_dlpack(model.run({})["y"]), x)


def test_bound_tensor_is_dropped_with_its_binding(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    """At once, without the garbage collector."""
    tensor = laid_out_for(model, put(drawn(1)))
    known = weakref.ref(tensor)
    model.bind("x", tensor)
    model.launch()
    del tensor
    assert known() is not None
    model.bind("x", None)
    assert known() is None
