"""Arrays that are bound to a program on a GPU, which reads and writes them where they are.

Most tests run on a driver of host memory, too, where tensors of the CPU are said to be on the GPU.
"""

import _thread
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Executable, InputError
from nimblert.cuda.memory import DeviceMemory
from nimblert.cuda.transfers import Inlet

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")


def laid_out_for(model: Executable, tensor: Any) -> Any:
    """The same tensor with the strides that the plan reads."""
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


def test_ctrl_c_comes_before_or_after_a_binding(
    put: Callable[[np.ndarray], Any], model: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, moved = laid_out_for(model, put(drawn(0))), Inlet.moved

    def interrupted(inlet: Inlet, memory: DeviceMemory) -> None:
        _thread.interrupt_main()
        moved(inlet, memory)

    monkeypatch.setattr(Inlet, "moved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.bind("x", x)
    for seed in (1, 2):
        x.copy_(put(drawn(seed)))
        assert torch.equal(torch.from_dlpack(model.run({})["y"]), x)


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


@on_gpu
def test_an_array_that_moves_under_a_binding_is_a_sentence(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        x = put(drawn(0))
        model.bind("x", x)
        x.data = put(drawn(1))
        for run in (model.launch, lambda: model.run({})):
            with pytest.raises(InputError, match="'x': its array was moved or resized since"):
                run()
        model.bind("x", x)
        assert torch.equal(torch.from_dlpack(model.run({})["y"]), x)
