"""Arrays into and out of a program on a GPU: of the host and of the device, of every layout, kept and reused."""

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest

import nimblert
from nimblert import Arena, Executable, InputError, driver
from nimblert.dtypes import numpy_dtype
from nimblert.plan import ITEM_NBYTES, Memcpy, Op, Plan, Pointer, Program, Region, Target, Tensor

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

SHAPE = (4, 3, 32, 24)
ROUNDS = 20
ORDERS = {"contiguous": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "odd": (3, 0, 2, 1)}


def strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor without holes whose axis ``order[-1]`` is the innermost, in elements."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return tuple(found)


def laid_out(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """The same array, in memory of another order."""
    inverse = np.argsort(order)
    return np.ascontiguousarray(array.transpose(order)).transpose(inverse)


def copying(shape: Sequence[int], order: Sequence[int], dtype: str = "float32") -> Plan:
    """A plan that copies its input to its output by way of the arena, both laid out in ``order``."""
    nbytes = prod(shape) * ITEM_NBYTES[dtype]
    places = [Pointer(region=region) for region in (Region.INPUT, Region.ARENA, Region.OUTPUT)]

    def tensor(name: str, place: Pointer) -> Tensor:
        return Tensor(name=name, dtype=dtype, shape=tuple(shape), strides=strides(shape, order), pointer=place)

    commands = tuple(
        Memcpy(
            dst=dst,
            src=src,
            nbytes=nbytes,
            stream=0,
            op=0,
        )
        for src, dst in pairwise(places)
        if nbytes
    )
    program = Program(
        name="main",
        stream_count=1,
        event_count=0,
        ops=(Op(name="copy", source=""),),
        commands=commands,
        inputs=(tensor("x", places[0]),),
        outputs=(tensor("y", places[2]),),
        arena_nbytes=nbytes,
        input_nbytes=(nbytes,),
        output_nbytes=(nbytes,),
    )
    driver.initialise()
    return Plan(
        producer="tests",
        versions=(),
        target=Target.CUDA,
        device=driver.describe(),
        modules=(),
        kernels=(),
        weights_nbytes=0,
        weights=(),
        state_nbytes=0,
        state=(),
        programs=(program,),
    )


def drawn(seed: int, shape: Sequence[int] = SHAPE, dtype: str = "float32") -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 100, tuple(shape))
    return bits.astype(numpy_dtype(dtype))


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return ORDERS[request.param]


@pytest.fixture
def model(order: tuple[int, ...]) -> Iterator[Executable]:
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
def test_elements_of_every_size(dtype: str) -> None:
    with nimblert.load(copying((2, 5, 7), (0, 2, 1), dtype)) as model:
        x = drawn(1, (2, 5, 7), dtype)
        assert np.array_equal(model(x), x)
        assert np.array_equal(model(laid_out(x, (2, 1, 0))), x)


def test_what_has_no_elements_and_what_has_one() -> None:
    for shape in ((0, 3), ()):
        with nimblert.load(copying(shape, range(len(shape)))) as model:
            assert np.array_equal(model(np.full(shape, 3, np.float32)), np.full(shape, 3, np.float32))


def test_large_arrays_are_copied_by_several_threads() -> None:
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


def test_outputs_outlive_the_executable(order: tuple[int, ...]) -> None:
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


def test_tensors_of_every_layout_stay_on_the_gpu(model: Executable) -> None:
    x = torch.from_numpy(drawn(0)).cuda()
    wide = torch.zeros(4, 3, 32, 48, device="cuda")
    wide[..., ::2] = x
    flipped = x.flip(0)
    for tensor in (x, x.to(memory_format=torch.channels_last), wide[..., ::2], x.expand(4, 3, 32, 24), flipped):
        output = model(tensor)
        assert not isinstance(output, np.ndarray)
        assert torch.equal(torch.from_dlpack(output), tensor)
        assert torch.equal(torch.as_tensor(output, device="cuda"), tensor)


def test_tensors_that_come_out_stay_as_they_are(model: Executable) -> None:
    tensors = [torch.from_numpy(drawn(seed)).cuda() for seed in range(6)]
    kept = [torch.from_dlpack(model(tensor)) for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in kept}) == 6
    assert all(torch.equal(*pair) for pair in zip(kept, tensors, strict=True))
    addresses = {tensor.data_ptr() for tensor in kept}
    del kept
    again = [torch.from_dlpack(model(tensor)) for tensor in tensors]
    assert {tensor.data_ptr() for tensor in again} <= addresses
    assert all(torch.equal(*pair) for pair in zip(again, tensors, strict=True))


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


def test_an_output_goes_to_a_tensor(model: Executable) -> None:
    x = torch.from_numpy(drawn(8)).cuda()
    for tensor in (torch.zeros_like(x), torch.zeros_like(x).to(memory_format=torch.channels_last)):
        assert model.run({"x": x}, out={"y": tensor})["y"] is tensor
        assert torch.equal(tensor, x)
        tensor.zero_()
        model.run({"x": drawn(8)}, out={"y": tensor})
        assert torch.equal(tensor, x)
    view = torch.from_dlpack(model.run({"x": x}, reuse_outputs=True)["y"])
    model(drawn(9))
    assert np.array_equal(view.cpu().numpy(), drawn(9))


def test_bfloat16() -> None:
    with nimblert.load(copying((2, 5, 7), (0, 2, 1), "bfloat16")) as model:
        x = torch.randn(2, 5, 7, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(torch.from_dlpack(model(x)), x)


def test_what_does_not_fit_is_a_sentence(model: Executable) -> None:
    x = torch.zeros(SHAPE, device="cuda")
    for value, sentence in (
        (x.half(), "input 'x': dtype float16, expected float32"),
        (x[:2], r"input 'x': shape \(2, 3, 32, 24\), expected"),
        (x.clone().requires_grad_(), "input 'x': it does not come by DLPack"),
    ):
        with pytest.raises(InputError, match=sentence):
            model(value)
    with pytest.raises(InputError, match=r"out 'y': strides .* cannot be written on the device"):
        model.run({"x": x}, out={"y": torch.zeros(1, device="cuda").expand(SHAPE)})
    assert np.array_equal(model(drawn(1)), drawn(1))


def test_threads_with_contexts(model: Executable) -> None:
    def work(thread: int) -> None:
        with model.context() as context:
            for seed in range(thread, thread + 50):
                assert np.array_equal(context(drawn(seed)), drawn(seed))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_contexts_hold_only_what_is_their_own() -> None:
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


def test_plans_share_an_arena() -> None:
    plans = [copying((rows, 3, 64, 64), range(4)) for rows in (1, 4, 16)]
    with Arena.for_plans(*plans) as arena:
        models = [nimblert.load(plan, arena=arena) for plan in plans]
        for _ in range(2):
            for model in models:
                x = drawn(1, model.inputs[0].shape)
                assert np.array_equal(model(x), x)
        for model in models:
            model.close()


def test_a_launch_does_not_wait(model: Executable) -> None:
    x = torch.from_numpy(drawn(3)).cuda()
    model(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        model.backend.launch(stream.cuda_stream)
        assert not stream.query()
    stream.synchronize()


def test_another_device(order: tuple[int, ...]) -> None:
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
