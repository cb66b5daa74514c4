"""Arrays into and out of a program on a GPU: of the host and of the device, of every layout.

Most tests run on a driver of host memory, too, where tensors of the CPU are said to be on the GPU.
"""

import gc
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, laid_out, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Executable, InputError
from nimblert.cuda import driver
from nimblert.plan import Memcpy, Pointer, Region

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")


def test_numpy_arrays_of_every_layout(model: Executable) -> None:
    x = drawn(0)
    wide = np.zeros((4, 3, 32, 48), np.float32)
    wide[..., ::2] = x
    arrays = [laid_out(x, order) for order in ORDERS.values()]
    arrays += [wide[..., ::2], x[::-1][::-1], np.broadcast_to(x[:1], SHAPE)]
    for array in arrays:
        assert np.array_equal(model(array), array)


@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "int64", "complex128"])
def test_elements_of_every_size(put: object, dtype: str) -> None:
    del put
    with nimblert.load(copying((2, 5, 7), (0, 2, 1), dtype)) as model:
        x = drawn(1, (2, 5, 7), dtype)
        assert np.array_equal(model(x), x)
        assert np.array_equal(model(laid_out(x, (2, 1, 0))), x)


def test_what_has_no_elements_and_what_has_one(put: object) -> None:
    del put
    for shape in ((0, 3), ()):
        with nimblert.load(copying(shape, range(len(shape)))) as model:
            assert np.array_equal(model(np.full(shape, 3, np.float32)), np.full(shape, 3, np.float32))


def test_large_arrays_are_copied_by_several_threads(put: object) -> None:
    del put
    shape = (3, 5, 700, 501)
    with nimblert.load(copying(shape, ORDERS["channels last"])) as model:
        for seed in range(3):
            x = drawn(seed, shape)
            assert np.array_equal(model(x), x)
            assert np.array_equal(model(laid_out(x, ORDERS["channels last"])), x)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_memory_of_dropped_outputs_is_used_again(put: object, order: tuple[int, ...]) -> None:
    del put
    shape = (4, 3, 64, 48)
    with nimblert.load(copying(shape, order)) as model:
        kept = [model(drawn(seed, shape)) for seed in range(8)]
        addresses = {array.__array_interface__["data"][0] for array in kept}
        assert len(addresses) == 8
        for seed, array in enumerate(kept):
            assert np.array_equal(array, drawn(seed, shape))
        part = kept[3][1:]
        del kept, array
        gc.collect()
        again = [model(drawn(seed, shape)) for seed in range(8, 15)]
        assert {array.__array_interface__["data"][0] for array in again} <= addresses
        assert np.array_equal(part, drawn(3, shape)[1:])


def test_outputs_outlive_the_executable(put: object, order: tuple[int, ...]) -> None:
    del put
    model = nimblert.load(copying(SHAPE, order))
    array = model(drawn(5))
    model.close()
    assert np.array_equal(array, drawn(5))
    array[...] = 0


def test_an_output_goes_to_the_callers_array(model: Executable) -> None:
    for layout in ORDERS.values():
        mine = laid_out(np.zeros(SHAPE, np.float32), layout)
        assert model.run({"x": drawn(2)}, out={"y": mine})["y"] is mine
        assert np.array_equal(mine, drawn(2))
    view = model.run({"x": drawn(3)}, reuse_outputs=True)["y"]
    assert np.array_equal(view, drawn(3))
    model.run({"x": drawn(4)}, reuse_outputs=True)
    assert np.array_equal(view, drawn(4))


def test_steps_take_what_runs_take(model: Executable) -> None:
    assert [type(work) for work in model.steps({"x": laid_out(drawn(6), ORDERS["odd"])})] == [Memcpy, Memcpy]
    assert np.array_equal(model.read(Pointer(region=Region.ARENA), 16), _memory(drawn(6), model)[:16])


def _memory(array: np.ndarray, model: Executable) -> np.ndarray:
    (tensor,) = model.inputs
    order = sorted(range(array.ndim), key=lambda axis: -tensor.strides[axis])
    return np.ascontiguousarray(array.transpose(order)).reshape(-1).view(np.uint8)


def test_tensors_of_every_layout_stay_on_the_gpu(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x = put(drawn(0))
    wide = put(np.zeros((4, 3, 32, 48), np.float32))
    wide[..., ::2] = x
    flipped = x.flip(0)
    for tensor in (x, x.to(memory_format=torch.channels_last), wide[..., ::2], x.expand(4, 3, 32, 24), flipped):
        output = model(tensor)
        assert not isinstance(output, np.ndarray)
        assert torch.equal(torch.from_dlpack(output), tensor)
        if tensor.is_cuda:
            assert torch.equal(torch.as_tensor(output, device="cuda"), tensor)


def test_tensors_that_come_out_stay_as_they_are(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    tensors = [put(drawn(seed)) for seed in range(6)]
    kept = [torch.from_dlpack(model(tensor)) for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in kept}) == 6
    assert all(torch.equal(*pair) for pair in zip(kept, tensors, strict=True))
    addresses = {tensor.data_ptr() for tensor in kept}
    del kept
    again = [torch.from_dlpack(model(tensor)) for tensor in tensors]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    assert all(torch.equal(*pair) for pair in zip(again, tensors, strict=True))


def test_an_output_goes_to_a_tensor(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x = put(drawn(8))
    for tensor in (torch.zeros_like(x), torch.zeros_like(x).to(memory_format=torch.channels_last)):
        assert model.run({"x": x}, out={"y": tensor})["y"] is tensor
        assert torch.equal(tensor, x)
        tensor.zero_()
        model.run({"x": drawn(8)}, out={"y": tensor})
        assert torch.equal(tensor, x)
    view = torch.from_dlpack(model.run({"x": x}, reuse_outputs=True)["y"])
    model(drawn(9))
    assert np.array_equal(view.cpu().numpy(), drawn(9))


@on_host
def test_an_output_goes_to_an_array_whose_axes_run_backwards(host: HostDriver) -> None:
    shape = (4, 3, 5)
    with nimblert.load(copying(shape, (1, 0, 2))) as model:
        for steps in product((1, -1, 2), repeat=3):
            room = np.zeros([size * abs(step) for size, step in zip(shape, steps, strict=True)], np.float32)
            mine = room[tuple(slice(None, None, step) for step in steps)]
            model.run({"x": drawn(1, shape)}, out={"y": SimpleNamespace(__cuda_array_interface__=interface(mine))})
            assert np.array_equal(mine, drawn(1, shape))
            assert (room != 0).sum() == (drawn(1, shape) != 0).sum()
    del host


def test_an_output_of_no_elements_goes_to_an_array(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(copying((0, 3), (1, 0))) as model:
        mine = put(np.zeros(1, np.float32)).new_zeros((0, 3))  # with other strides than numpy's
        assert model.run({"x": put(drawn(1, (0, 3)))}, out={"y": mine})["y"] is mine


def interface(array: np.ndarray) -> dict[str, Any]:
    """Return the CUDA array interface of an array of numpy."""
    return {**array.__array_interface__, "strides": array.strides}


def test_bfloat16(put: Callable[[np.ndarray], Any]) -> None:
    with nimblert.load(copying((2, 5, 7), (0, 2, 1), "bfloat16")) as model:
        x = put(drawn(2, (2, 5, 7))).bfloat16()
        assert torch.equal(torch.from_dlpack(model(x)), x)


def test_what_does_not_fit_is_a_sentence(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x = put(np.zeros(SHAPE, np.float32))
    for value, sentence in (
        (x.half(), "input 'x': dtype float16, expected float32"),
        (x[:2], r"input 'x': shape \(2, 3, 32, 24\), expected"),
        (x.clone().requires_grad_(), "input 'x': it does not come by DLPack"),
    ):
        with pytest.raises(InputError, match=sentence):
            model(value)
    with pytest.raises(InputError, match=r"out 'y': elements of the array share memory"):
        model.run({"x": x}, out={"y": put(np.zeros(1, np.float32)).expand(SHAPE)})
    assert np.array_equal(model(drawn(1)), drawn(1))


@on_gpu
def test_another_device(put: object, order: tuple[int, ...]) -> None:
    del put
    count = driver.call("cuDeviceGetCount")
    with pytest.raises(nimblert.DeviceMismatchError, match=f"device {count}: CUDA shows {count} here"):
        nimblert.load(copying(SHAPE, order), device=count)
    if count < 2:
        pytest.skip("one GPU")
    with nimblert.load(copying(SHAPE, order), device=1) as model:
        assert np.array_equal(model(drawn(1)), drawn(1))
        x = torch.from_numpy(drawn(2)).cuda(1)
        assert torch.equal(torch.from_dlpack(model(x)), x)
        with pytest.raises(InputError, match="input 'x': is on GPU 0, the plan runs on GPU 1: copy it there"):
            model(x.cuda(0))


@on_host
def test_the_gpu_of_a_call_is_current_afterwards(host: HostDriver) -> None:
    first, second = (nimblert.load(copying(SHAPE, ORDERS["contiguous"]), device=device) for device in (0, 1))
    with first, second:
        for device, model in ((0, first), (1, second), (0, first)):
            model(drawn(0))
            assert host.current_device == device


@on_host
def test_an_array_of_the_interface_may_be_on_another_gpu(put: object, host: HostDriver) -> None:
    """The interface does not tell."""
    del put
    x = drawn(1)

    def allocated(ordinal: int) -> Any:
        driver.Context(ordinal).make_current()
        interface = x.__array_interface__ | {"data": (int(driver.call("cuMemAlloc", x.nbytes)), False)}
        np.asarray(SimpleNamespace(__array_interface__=interface))[...] = x
        return SimpleNamespace(__cuda_array_interface__=interface)

    here, there = allocated(0), allocated(1)
    on_the_host = SimpleNamespace(__cuda_array_interface__=x.__array_interface__)
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        uses = (lambda: model(there), lambda: model.bind("x", there), lambda: model.run({"x": x}, out={"y": there}))
        for use in uses:
            with pytest.raises(InputError, match=r"'[xy]': is on GPU 1, the plan runs on GPU 0: copy it there"):
                use()
        host.managed.add(there.__cuda_array_interface__["data"][0])
        for value in (here, there, on_the_host):
            assert np.array_equal(torch.from_dlpack(model(value)), x)
        host.devices = 1
        with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as alone:
            asked = host.calls["cuPointerGetAttributes"]
            assert np.array_equal(torch.from_dlpack(alone(here)), x)
            assert host.calls["cuPointerGetAttributes"] == asked


@on_host
def test_a_call_takes_few_calls_of_the_driver(put: Callable[[np.ndarray], Any], host: HostDriver) -> None:
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        x, tensor = drawn(0), put(drawn(0))
        model(x)
        model(tensor)
        counts = []
        for value in (x, tensor):
            host.calls.clear()
            model(value)
            counts.append(sum(host.calls.values()))
        model.launch(0x77)
        host.calls.clear()
        model.launch(0x77)
        assert (*counts, sum(host.calls.values())) == (5, 5, 3)
