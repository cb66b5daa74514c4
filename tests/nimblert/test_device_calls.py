"""Calls of a CUDA plan that come again: results, errors, order on streams, and the memory that is left.

The third call of host arrays of the same layout makes a graph of its own, and the sixteenth of GPU arrays at the same
addresses.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, by_kernel, copying, copying_each, drawn, laid_out, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import CudaError, Executable, InputError
from nimblert.plan import ITEM_NBYTES, Memcpy, Memset, Plan, Pointer, Region

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch offers no table of functions", allow_module_level=True)

Put = Callable[[np.ndarray], Any]
ENOUGH = 20
"""Calls after which those of one kind have graphs."""


@pytest.fixture
def order() -> tuple[int, ...]:
    """Return the order in memory of the axes of `model`'s input and output."""
    return ORDERS["channels last"]


def with_program(plan: Plan, **changes: Any) -> Plan:
    (program,) = plan.programs
    return replace(plan, programs=(replace(program, **changes),))


def values(output: Any) -> np.ndarray:
    return output if isinstance(output, np.ndarray) else torch.from_dlpack(output).cpu().numpy()


def layouts_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the same array in every order of axes, with gaps and backwards."""
    for order in ORDERS.values():
        yield laid_out(array, order)
    yield np.repeat(array, 2, axis=-1)[..., ::2]
    yield array[::-1].copy()[::-1]


@pytest.mark.parametrize("own", ORDERS)
@pytest.mark.parametrize("shape", [SHAPE, (4, 3, 128, 96)], ids=["small", "large"])
def test_each_call_computes_with_its_own_array_of_any_layout(put: Put, own: str, shape: tuple[int, ...]) -> None:
    kept = []
    with nimblert.load(copying(shape, ORDERS[own]), poison=True) as model:
        for seed in range(6):
            for array in layouts_of(drawn(seed, shape)):
                outputs = model(array), model(put(array))
                assert [isinstance(output, np.ndarray) for output in outputs] == [True, False]
                assert all(np.array_equal(values(output), array) for output in outputs)
                if seed % 2:
                    kept.append((seed, *outputs))
        for seed, *outputs in kept:
            assert all(np.array_equal(values(output), drawn(seed, shape)) for output in outputs)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((33,), "uint8"),
        ((3, 5), "float16"),
        ((3, 40), "bfloat16"),
        ((3, 40), "bool"),
        (((1 << 16) + 1,), "int8"),
        (((1 << 16) + 1,), "int64"),
        (((1 << 19) + 1,), "uint8"),
        (((1 << 18) + 1,), "float32"),
    ],
)
def test_each_call_brings_every_byte_into_a_new_array(put: Put, shape: tuple[int, ...], dtype: str) -> None:
    del put
    plan = by_kernel(copying((*shape, ITEM_NBYTES[dtype]), range(len(shape) + 1), "uint8"))
    (program,) = plan.programs
    strides = tuple(stride // ITEM_NBYTES[dtype] for stride in program.outputs[0].strides[:-1])
    output = replace(program.outputs[0], dtype=dtype, shape=shape, strides=strides)
    kept = []
    with nimblert.load(with_program(plan, outputs=(output,)), poison=True) as model:
        for seed in range(8):
            expected = drawn(seed, shape, dtype)
            found = model(expected.view(np.uint8).reshape(program.inputs[0].shape))
            assert found.dtype == expected.dtype
            kept.append((expected, found))
    assert all(np.array_equal(expected, found) for expected, found in kept)


def test_calls_of_several_inputs_on_the_host_and_the_gpu(put: Put) -> None:
    """Outputs are on the GPU if any input is."""
    shapes = [(5,), (300, 200), (1, 7)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(5 * 8):
            arrays = [drawn(seed + index, shape) for index, shape in enumerate(shapes)]
            given = [put(array) if seed & 1 << index else array for index, array in enumerate(arrays)]
            found = model(*given)
            assert all(isinstance(y, np.ndarray) is (seed % 8 == 0) for y in found)
            assert all(np.array_equal(values(y), x) for y, x in zip(found, arrays, strict=True))


@on_host
@pytest.mark.parametrize(
    ("bring", "count"),
    [(lambda x, _: x, 4), (lambda x, place: place.copy_(torch.from_numpy(x)), ENOUGH)],
    ids=["host", "gpu"],
)
def test_call_that_comes_again_is_one_launch(
    model: Executable, put: Put, host: HostDriver, bring: Callable[[np.ndarray, Any], Any], count: int
) -> None:
    place = put(laid_out(drawn(0), ORDERS["odd"]))
    for seed in range(count):
        assert np.array_equal(values(model(bring(drawn(seed), place))), drawn(seed))
    model(bring(drawn(8), place))  # whose output no other library has
    host.calls.clear()
    model(bring(drawn(9), place))
    assert host.calls.keys() <= {"cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize"}
    assert host.calls["cuGraphLaunch"] == 1


def test_call_in_the_layout_of_the_program_is_kept_and_replayed(model: Executable, put: Put) -> None:
    """Kernels then use the caller's array and the new output in place of the program's memory."""
    place = put(laid_out(drawn(0), ORDERS["channels last"]))
    kept = []
    for seed in range(80):
        place.copy_(torch.from_numpy(drawn(seed)))
        found = model(place)
        assert np.array_equal(values(found), drawn(seed))
        if seed % ENOUGH == 0:  # later calls write to another block
            kept.append((seed, found))
        place.zero_()
        del found
    for seed, output in kept:
        assert np.array_equal(values(output), drawn(seed))
    view = model.run({"x": put(drawn(99))}, reuse_outputs=True)["y"]
    place.copy_(torch.from_numpy(drawn(79)))
    model(place)
    place.zero_()
    model.replay()
    assert np.array_equal(values(view), drawn(79))


def test_replay_repeats_a_call_of_the_host_in_its_own_memory(put: Put) -> None:
    del put
    plan = by_kernel(copying(SHAPE, ORDERS["contiguous"]))
    (tensor,) = plan.programs[0].outputs
    with nimblert.load(plan, poison=True) as model:
        for seed in range(6):
            found = model(drawn(seed))
        for repeat in (model.replay, model.launch):
            found[...] = -1
            repeat()
            held = model.read(tensor.pointer, tensor.span_nbytes).view(np.float32).reshape(SHAPE)
            assert np.array_equal(held, drawn(5))
            assert (found == -1).all()
            assert np.array_equal(model(drawn(0)), drawn(0))
            assert np.array_equal(model(drawn(5)), drawn(5))


@on_host
def test_number_may_come_on_the_gpu(put: Put) -> None:
    with nimblert.load(copying((), (), "int64")) as model:
        number = put(np.array(0))
        for value in range(2 * ENOUGH):
            assert values(model(number.fill_(value))) == value


@on_host
def test_program_that_writes_its_input_leaves_the_callers_alone(put: Put) -> None:
    plan = copying(SHAPE, ORDERS["contiguous"])
    first, *others = plan.programs[0].commands
    assert isinstance(first, Memcpy)
    fill = Memset(dst=first.src, value=0, element_nbytes=1, count=first.nbytes, stream=0, op=0)
    with nimblert.load(with_program(plan, commands=(first, *others, fill))) as model:
        tensor = put(drawn(1))
        for _ in range(2 * ENOUGH):
            assert np.array_equal(values(model(tensor)), drawn(1))
        assert np.array_equal(values(tensor), drawn(1))


@on_host
def test_output_that_a_run_overwrites_may_be_its_input(put: Put) -> None:
    """Two outputs share their memory here, so that kernels always write them there."""
    plan = copying((2, 8), (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    first, second = (replace(program.commands[0], nbytes=32, src=x.pointer, dst=y.pointer) for _ in range(2))
    first = replace(first, src=replace(x.pointer, offset=32))
    second = replace(second, dst=replace(y.pointer, offset=32))
    plan = with_program(plan, commands=(first, second), outputs=(y, replace(y, name="again")))
    with nimblert.load(plan) as model:
        view = torch.from_dlpack(model.run({"x": put(drawn(0, (2, 8)))}, reuse_outputs=True)["y"])
        for seed in range(ENOUGH):
            view.copy_(torch.from_numpy(drawn(seed, (2, 8))))
            assert np.array_equal(values(model(view)[0]), drawn(seed, (2, 8))[::-1])


def test_outputs_that_share_memory_are_each_an_array_of_its_own(put: Put) -> None:
    """One alone, two in one place, and one that is the input."""
    plan = by_kernel(copying(SHAPE, ORDERS["contiguous"]))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    other = Pointer(region=Region.OUTPUT, index=1)
    copy = Memcpy(dst=other, src=x.pointer, nbytes=x.span_nbytes, stream=0, op=0)
    plan = with_program(
        plan,
        commands=(*program.commands, copy),
        outputs=(y, *(replace(y, name=name, pointer=other) for name in "zw"), replace(x, name="same")),
        output_nbytes=(*program.output_nbytes, x.span_nbytes),
    )
    with nimblert.load(plan, poison=True) as model:
        tensor, kept = put(drawn(0)), []
        for seed in range(4 * ENOUGH):
            for given in (drawn(seed), tensor.copy_(torch.from_numpy(drawn(seed)))):
                found = model(given)
                assert all(np.array_equal(values(each), drawn(seed)) for each in found)
                if seed % ENOUGH == 0:
                    kept.append((seed, found[seed // ENOUGH]))
                del found
        tensor.zero_()
        assert all(np.array_equal(values(each), drawn(seed)) for seed, each in kept)


@on_host
def test_program_without_commands_returns_its_inputs(put: Put) -> None:
    plan = copying(SHAPE, ORDERS["channels last"])
    outputs = (replace(plan.programs[0].inputs[0], name="same"),)
    with nimblert.load(with_program(plan, commands=(), outputs=outputs)) as model:
        tensor = put(drawn(0))
        for seed in range(ENOUGH):
            assert np.array_equal(model(drawn(seed)), drawn(seed))
            assert np.array_equal(values(model(tensor.copy_(torch.from_numpy(drawn(seed))))), drawn(seed))


@on_host
def test_arrays_at_ever_new_addresses_get_few_graphs(model: Executable, put: Put, host: HostDriver) -> None:
    made, live = host.calls["cuGraphInstantiate"], host.live["executable graph"]
    places = [put(drawn(seed)) for seed in range(12)]
    for _ in range(100):
        for seed, place in enumerate(places):
            assert np.array_equal(values(model(place)), drawn(seed))
    assert host.calls["cuGraphInstantiate"] - made <= 8
    assert host.live["executable graph"] - live == 4


def test_wrong_arrays_are_refused_as_in_the_first_call(model: Executable, put: Put) -> None:
    for _ in range(ENOUGH):
        model(drawn(0))
        model(put(drawn(0)))
    for value, sentence in (
        (drawn(0).astype(np.float64), "dtype float64, expected float32"),
        (drawn(0)[:2], r"shape \(2, 3, 32, 24\), expected"),
        (put(drawn(0).astype(np.int32)), "dtype int32, expected float32"),
        (put(drawn(0)[:, :2]), r"shape \(4, 2, 32, 24\), expected"),
        (put(drawn(0)).requires_grad_(), "does not come by DLPack: .*requires? grad"),
        ([1.0], "got list, expected a numpy array"),
    ):
        with pytest.raises(InputError, match=rf"^input 'x': .*{sentence}"):
            model.run({"x": value})
    with pytest.raises(InputError, match="'z' is not one of the plan's inputs"):
        model.run({"z": put(drawn(0))})
    with pytest.raises(InputError, match="missing"):
        model.run({})
    assert np.array_equal(values(model(put(drawn(3)))), drawn(3))


def test_tensor_changed_in_place_is_checked_again(model: Executable, put: Put) -> None:
    """At the same address."""
    tensor = put(drawn(1))
    for _ in range(ENOUGH):
        model(tensor)
    tensor.requires_grad_()
    with pytest.raises(InputError, match="does not come by DLPack"):
        model(tensor)
    tensor.requires_grad_(False)
    with pytest.raises(InputError, match=r"it is a negated view: give what .resolve_neg\(\) returns"):
        model(torch._neg_view(tensor))
    tensor.transpose_(2, 3)
    with pytest.raises(InputError, match=r"shape \(4, 3, 24, 32\), expected"):
        model(tensor)
    assert np.array_equal(values(model(tensor.transpose_(2, 3))), drawn(1))


@on_gpu
def test_conjugate_view_is_refused_after_its_tensor(put: Put) -> None:
    with nimblert.load(copying((2, 3), (0, 1), "complex64")) as model:
        tensor = put(drawn(1, (2, 3), "complex64"))
        for _ in range(ENOUGH):
            assert np.array_equal(values(model(tensor)), drawn(1, (2, 3)))
        with pytest.raises(InputError, match="does not come by DLPack"):
            model(tensor.conj())


def test_binding_ends_calls_like_earlier_ones(model: Executable, put: Put) -> None:
    tensor = put(drawn(1))
    for _ in range(ENOUGH):
        model(tensor)
    model.bind("x", put(drawn(2)).contiguous(memory_format=torch.channels_last))
    assert np.array_equal(values(model.run({})["y"]), drawn(2))
    with pytest.raises(InputError, match="'x' is bound"):
        model(tensor)
    model.bind("x", None)
    for _ in range(ENOUGH):
        assert np.array_equal(values(model(tensor)), drawn(1))


@on_host
def test_fake_tensor_is_refused_after_tensors_too(model: Executable, put: Put) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(put(laid_out(drawn(0), order))) for order in ORDERS.values()]
    for order in ORDERS.values():
        model(put(laid_out(drawn(0), order)))
    for fake in (*fakes, *fakes, torch._efficientzerotensor(SHAPE)):
        with pytest.raises(InputError, match=r"input 'x': .*it has no memory, as a fake tensor has none"):
            model(fake)


@on_host
def test_array_that_begins_within_an_element_is_refused(model: Executable, put: Put) -> None:
    """A kernel that reads it ends the use of CUDA in the process."""
    memory = np.zeros(drawn(0).nbytes + 4, np.uint8)
    arrays = [memory[start : start + drawn(0).nbytes].view(np.float32).reshape(SHAPE) for start in (4, 1, 2)]
    for array in arrays:
        interface = {**array.__array_interface__, "stream": None}
        for value in (torch.from_numpy(array), SimpleNamespace(__cuda_array_interface__=interface)):
            if array is arrays[0]:
                assert np.array_equal(values(model(value)), array)
                continue
            with pytest.raises(InputError, match=r"'x': address 0x[0-9a-f]+, expected a multiple of 4"):
                model(value)
            with pytest.raises(InputError, match=r"'y': address 0x[0-9a-f]+, expected a multiple of 4"):
                model.run({"x": put(drawn(0))}, out={"y": value})


@pytest.mark.parametrize(
    "use",
    [
        lambda model, tensor: model(tensor),
        lambda model, tensor: model.run({"x": tensor}, stream=0),
        lambda model, tensor: model.bind("x", tensor),
        lambda model, tensor: list(model.steps({"x": tensor})),
    ],
    ids=["call", "run", "bind", "steps"],
)
def test_array_for_a_closed_executable_is_left_alone(model: Executable, put: Put, use: Callable[..., object]) -> None:
    """Its stream is not asked to wait by a destroyed event, on which drivers crash."""
    model.close()
    with pytest.raises(InputError, match="is closed"):
        use(model, put(drawn(1)))


@on_host
def test_call_runs_on_the_librarys_stream_after_launches(model: Executable, put: Put, host: HostDriver) -> None:
    tensor = put(drawn(1))
    model(tensor)
    model.launch(0x77)
    host.waits.clear()
    model(tensor)
    assert host.waits == [(0, 0x77)]  # torch's own stream of the CPU is 0


@on_host
@pytest.mark.parametrize("count", [1, ENOUGH])
def test_launch_failure_leaves_next_call(model: Executable, put: Put, host: HostDriver, count: int) -> None:
    for value in (drawn(1), put(drawn(1))):
        for _ in range(count):
            model(value)
        host.failing["cuGraphLaunch"] = host.CUresult.CUDA_ERROR_UNKNOWN
        synchronised = host.calls.get("cuStreamSynchronize", 0)
        with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
            model(value)
        assert host.calls["cuStreamSynchronize"] > synchronised
        host.failing.clear()
        assert np.array_equal(values(model(value)), drawn(1))


@on_host
def test_output_that_another_library_may_use_is_waited_for(model: Executable, put: Put, host: HostDriver) -> None:
    tensor = put(drawn(1))
    model(tensor)

    def waits() -> int:
        host.calls.clear()
        model(tensor)
        return host.calls.get("cuStreamWaitEvent", 0)

    assert waits() == 0
    torch.from_dlpack(model(tensor))
    assert (waits(), waits()) == (1, 0)
    assert model(tensor).__cuda_array_interface__
    assert (waits(), waits()) == (1, 0)
    model.run({"x": tensor}, stream=0x77)  # which nobody has waited for
    model.synchronize()
    assert (waits(), waits()) == (1, 0)
