"""Arrays into and out of a program on a GPU: of the host and of the device, of every layout, kept, bound and reused.

Most tests run on a driver of host memory, too, where tensors of the CPU are said to be on the GPU.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, laid_out, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Arena, Executable, InputError
from nimblert.cuda import driver
from nimblert.plan import Memcpy, Pointer, Region

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

ROUNDS = 20


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return ORDERS[request.param]


@pytest.fixture
def model(put: object, order: tuple[int, ...]) -> Iterator[Executable]:
    del put
    with nimblert.load(copying(SHAPE, order), poison=True) as executable:
        yield executable


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


def test_outputs_stay_as_they_are_and_their_memory_is_used_again(model: Executable) -> None:
    kept = [model(drawn(seed)) for seed in range(8)]
    addresses = {array.__array_interface__["data"][0] for array in kept}
    assert len(addresses) == 8
    for seed, array in enumerate(kept):
        assert np.array_equal(array, drawn(seed))
    part = kept[3][1:]
    del kept, array
    gc.collect()
    again = [model(drawn(seed)) for seed in range(8, 15)]
    assert {array.__array_interface__["data"][0] for array in again} <= addresses
    assert np.array_equal(part, drawn(3)[1:])


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


@on_gpu
def test_memory_that_is_let_go_waits_for_the_work_that_reads_it(model: Executable) -> None:
    side = torch.cuda.Stream()
    sums, expected = [], []
    for seed in range(20):
        tensor = torch.from_numpy(drawn(seed)).cuda()
        with torch.cuda.stream(side):
            output = torch.from_dlpack(model(tensor))
            torch.cuda._sleep(2_000_000)
            sums.append(output.double().sum())
            del output
        expected.append(float(drawn(seed).astype(np.float64).sum()))
    side.synchronize()
    assert [float(total) for total in sums] == expected


@on_gpu
def test_a_stream_that_has_yet_to_write_the_input_is_waited_for(model: Executable) -> None:
    x = torch.zeros(SHAPE, device="cuda")
    new = torch.from_numpy(drawn(7)).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.copy_(new)
        output = model(x)
    assert torch.equal(torch.from_dlpack(output), new)


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


def test_threads_with_contexts(model: Executable) -> None:
    def work(thread: int) -> None:
        with model.context() as context:
            for seed in range(thread, thread + 50):
                assert np.array_equal(context(drawn(seed)), drawn(seed))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@on_gpu
def test_contexts_hold_only_what_is_their_own(put: object) -> None:
    del put
    shape = (8, 3, 512, 512)
    own = 3 * prod(shape) * 4  # arena, input, output
    with nimblert.load(copying(shape, range(4))) as model:

        def taken() -> int:
            free = driver.call("cuMemGetInfo")[0]
            contexts = [model.context() for _ in range(4)]
            found = free - driver.call("cuMemGetInfo")[0]
            for context in contexts:
                context.close()
            return int(found)

        # What other processes of the GPU take meanwhile is in some rounds, what a context takes in all.
        assert any(taken() <= 4 * own * 1.1 + (64 << 20) for _ in range(ROUNDS))


def test_plans_share_an_arena(put: object) -> None:
    del put
    plans = [copying((rows, 3, 64, 64), range(4)) for rows in (1, 4, 16)]
    with Arena.for_plans(*plans) as arena:
        models = [nimblert.load(plan, arena=arena) for plan in plans]
        for _ in range(2):
            for model in models:
                x = drawn(1, model.inputs[0].shape)
                assert np.array_equal(model(x), x)
        for model in models:
            model.close()


@on_gpu
def test_a_launch_does_not_wait(model: Executable) -> None:
    x = torch.from_numpy(drawn(3)).cuda()
    model(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        model.launch(stream.cuda_stream)
        assert not stream.query()
    stream.synchronize()


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


@on_gpu
def test_runs_in_many_threads_leave_the_memory_as_it_was(model: Executable) -> None:
    contexts = [model.context() for _ in range(4)]
    stop = threading.Event()

    def work(context: Any) -> int:
        count = 0
        while not stop.is_set():
            assert np.array_equal(context(drawn(count % 5)), drawn(count % 5))
            count += 1
        return count

    def lost() -> int:
        before = driver.call("cuMemGetInfo")[0]
        threading.Event().wait(0.2)
        return int(before - driver.call("cuMemGetInfo")[0])

    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(work, context) for context in contexts]
        threading.Event().wait(0.5)
        assert any(lost() <= 0 for _ in range(ROUNDS))
        stop.set()
        assert all(run.result() > 20 for run in runs)


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
        ("y", odd, "bind 'y': address .*, expected a multiple of 16"),
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


def test_a_run_on_a_stream_of_the_caller_is_not_waited_for(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x, y = put(drawn(0)), put(drawn(1))
    stream = torch.cuda.Stream() if x.is_cuda else 0x77
    outputs = []
    for seed in range(3):
        x = put(drawn(seed))
        torch_synchronize(x)
        outputs.append(model.run({"x": x}, stream=getattr(stream, "cuda_stream", stream))["y"])
    assert model.run({"x": x}, out={"y": y}, stream=getattr(stream, "cuda_stream", stream))["y"] is y
    model.synchronize()
    for seed, output in enumerate(outputs):
        assert np.array_equal(torch.from_dlpack(output).cpu().numpy(), drawn(seed))
    assert torch.equal(y, x)
    assert np.array_equal(model(drawn(4)), drawn(4))
    with pytest.raises(InputError, match="stream: got 'fast', expected a handle"):
        model.run({"x": x}, stream="fast")


@on_gpu
def test_what_is_enqueued_runs_one_after_the_other(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = [put(drawn(seed)) for seed in range(20)]
    outputs = []
    torch.cuda.synchronize()
    for index, tensor in enumerate(x):
        with torch.cuda.stream(streams[index % 2]):
            torch.cuda._sleep(1_000_000 * (index % 3))
            outputs.append(model.run({"x": tensor}, stream=streams[index % 2].cuda_stream)["y"])
    assert np.array_equal(model(drawn(30)), drawn(30))
    assert all(torch.equal(torch.from_dlpack(output), tensor) for output, tensor in zip(outputs, x, strict=True))


@on_host
def test_streams_wait_for_what_is_enqueued_in_the_same_memory(
    put: Callable[[np.ndarray], Any], host: HostDriver
) -> None:
    x = put(drawn(0))
    with Arena.for_plans(copying(SHAPE, ORDERS["odd"])) as arena:
        models = [nimblert.load(copying(SHAPE, ORDERS["odd"]), arena=arena) for _ in range(2)]
        models[0].run({"x": x}, stream=0x77)
        host.waits.clear()
        models[0].launch(0x77)
        assert host.waits == []
        models[1].run({"x": x}, stream=0x88)
        assert (0x88, 0x77) in host.waits
        models[0].replay()
        assert host.waits[-1][1] == 0x88
        host.waits.clear()
        models[1].launch(0x88)
        assert host.waits == []
        for model in models:
            model.close()


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
        host.calls.clear()
        model.launch(0x77)
        assert (*counts, sum(host.calls.values())) == (5, 7, 3)
