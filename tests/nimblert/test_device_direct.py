"""The usual call of a CUDA plan in one piece: what it costs in Python, what ends it, and in what order it runs."""

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, laid_out, on_host
from host_driver import HostDriver
from interrupting import WITHIN, interrupted

import nimblert
from nimblert import CudaError, Executable, InputError
from nimblert.cuda import early
from nimblert.cuda.direct import DeviceDirect
from nimblert.cuda.pools import PageLockedPool
from nimblert.plan import Memcpy, Memset

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("this torch offers no table of functions", allow_module_level=True)

TESTS = str(Path(__file__).parents[1])
NODES = ("cuGraphAddKernelNode", "cuGraphAddMemcpyNode")
LARGER = (4, 3, 128, 96)
"""Of an input that the copy engine brings."""
Put = Callable[[np.ndarray], Any]


@pytest.fixture
def model(put: Put) -> Iterator[Executable]:
    with nimblert.load(copying(SHAPE, ORDERS["channels last"]), poison=True) as executable:
        executable(put(drawn(0)))  # calls in one piece are made by one that is not
        yield executable


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call whether it was one in one piece."""
    found: list[bool] = []
    call = DeviceDirect.__call__

    def noting(self: DeviceDirect, arrays: Any) -> Any:
        results = call(self, arrays)
        found.append(results is not None)
        return results

    monkeypatch.setattr(DeviceDirect, "__call__", noting)
    return found


def channels_last(tensor: Any) -> Any:
    return tensor.contiguous(memory_format=torch.channels_last)


def on_the_host(output: Any) -> np.ndarray:
    return output if isinstance(output, np.ndarray) else torch.from_dlpack(output).cpu().numpy()


def functions(call: Callable[[], object]) -> int:
    """How many functions of the runtime a call runs before the launch is the driver's."""
    count = 0
    found: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call":
            count += "/nimblert/" in Path(frame.f_code.co_filename).as_posix().removeprefix(TESTS)
            if frame.f_code.co_name == "_cuGraphLaunch":
                found.append(count)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0]


@on_host
def test_little_of_python_comes_before_the_launch(model: Executable, put: Put, host: HostDriver) -> None:
    host.patience_s = 10.0
    x, tensor = drawn(1), put(drawn(1))
    for _ in range(20):
        model(x)
        model(tensor)
    assert functions(lambda: model.run({"x": x})) <= 15
    assert functions(lambda: model.run({"x": tensor})) <= 16
    model.bind("x", channels_last(tensor))
    model.launch()
    assert functions(model.launch) <= 6
    larger = drawn(1, LARGER)
    with nimblert.load(copying(LARGER, ORDERS["channels last"])) as early_one:
        for _ in range(20):
            early_one(larger)
        assert functions(lambda: early_one.run({"x": larger})) <= 15


def test_what_would_wait_for_a_call_or_a_launch_is_refused_within_it(model: Executable, put: Put) -> None:
    x, tensor = drawn(1), channels_last(put(drawn(1)))
    for call in (lambda: model(x), lambda: model(tensor), model.launch, model.replay):
        for _ in range(20):
            call()
        for use in (model.close, model.launch, lambda: model(x), lambda: model.bind("x", tensor)):
            _, message = interrupted(model._turn, call, use)
            assert WITHIN in message
            assert np.array_equal(model(x), x)


@on_host
def test_what_was_launched_is_closed_after_a_kernel_has_failed(model: Executable, host: HostDriver) -> None:
    model.launch()
    host.broken = True
    model.close()


@on_host
def test_a_launch_that_comes_again_is_refused_as_the_first(model: Executable, put: Put) -> None:
    model.launch(0x77)
    for stream in (-1, "s", object()):
        with pytest.raises(InputError, match=r"^stream: got .*, expected a handle"):
            model.launch(stream)
    tensor = channels_last(put(drawn(1)))
    model.bind("x", tensor)
    for _ in range(3):
        model.launch(0x77)
    model.synchronize()
    tensor.transpose_(2, 3)
    with pytest.raises(InputError, match="'x': its array was moved or resized"):
        model.launch()
    tensor.transpose_(2, 3)
    model.launch()
    steps = model.steps({})
    next(steps)
    with pytest.raises(InputError, match=r"a run by steps\(\) is half done"):
        model.launch()
    steps.close()
    model.launch()
    model.close()
    with pytest.raises(InputError, match="is closed"):
        model.launch()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor, _: tensor.t_(),
        lambda tensor, _: tensor.resize_(4, 8),
        lambda tensor, _: tensor.resize_(100, 100),
        lambda tensor, _: tensor.unsqueeze_(0),
        lambda tensor, _: tensor.untyped_storage().resize_(0),
        lambda tensor, other: tensor.set_(other),
    ],
    ids=["transposed", "smaller", "larger", "of another rank", "without memory", "elsewhere"],
)
def test_a_bound_tensor_changed_in_place_ends_launches(put: Put, change: Callable[[Any, Any], object]) -> None:
    x, other = (put(drawn(seed, (8, 8))).clone() for seed in range(2))  # numpy's memory cannot be resized
    with nimblert.load(copying((8, 8), range(2))) as model:
        model.bind("x", x)
        for _ in range(2):
            model.launch()
        model.synchronize()
        change(x, other)
        for run in (model.launch, model.launch, model.replay, lambda: model.run({})):
            with pytest.raises(InputError, match="'x': its array was moved or resized since it was bound: bind it ag"):
                run()
        model.bind("x", other)
        for _ in range(2):
            model.launch()
        assert np.array_equal(on_the_host(model.run({})["y"]), drawn(1, (8, 8)))


def test_a_bound_tensor_may_return_to_its_shape(put: Put) -> None:
    """PyTorch then stores a shape of more than five axes elsewhere."""
    shape = (2, 1, 2, 1, 2, 2)
    x = put(drawn(0, shape))
    with nimblert.load(copying(shape, range(6))) as model:
        model.bind("x", x)
        for _ in range(3):
            model.launch()
            x.unsqueeze_(0).squeeze_(0)
        assert np.array_equal(on_the_host(model.run({})["y"]), drawn(0, shape))


def test_a_tensor_is_dropped_with_its_binding(model: Executable, put: Put) -> None:
    """At once, without the garbage collector."""
    tensor = channels_last(put(drawn(1)))
    known = weakref.ref(tensor)
    model.bind("x", tensor)
    model.launch()
    del tensor
    assert known() is not None
    model.bind("x", None)
    assert known() is None


def test_every_call_gives_its_own_arrays_result(model: Executable, put: Put, taken: list[bool]) -> None:
    for seed in range(6):
        x = drawn(seed)
        for order in ORDERS.values():
            array = laid_out(x, order)
            for value in (array, put(array)):
                found = model(value)
                assert isinstance(found, np.ndarray) == isinstance(value, np.ndarray)
                assert np.array_equal(on_the_host(found), x)
    assert taken.count(True) > len(taken) * 3 // 4


@on_host
def test_inputs_that_come_again_are_brought_by_the_programs_own_graph(
    model: Executable, put: Put, host: HostDriver
) -> None:
    place = put(laid_out(drawn(0), (0, 1, 2, 3)))
    for bring, count, others in (
        (lambda x: x, 4, ["cuMemcpyHtoDAsync", "cuLaunchKernel"]),
        (lambda x: place.copy_(torch.from_numpy(x)), 17, ["cuLaunchKernel"]),
    ):
        for seed in range(count):
            assert np.array_equal(on_the_host(model(bring(drawn(seed)))), drawn(seed))
        calls = dict(host.calls)
        for seed in range(3):
            assert np.array_equal(on_the_host(model(bring(drawn(seed)))), drawn(seed))
        assert [host.calls[name] - calls[name] for name in ("cuGraphLaunch", *others)] == [3, *[0] * len(others)]
    model.bind("x", channels_last(put(drawn(7))))
    assert np.array_equal(on_the_host(model.run({})["y"]), drawn(7))
    model.bind("x", None)
    for seed in range(20):
        assert np.array_equal(on_the_host(model(drawn(seed))), drawn(seed))


@on_host
def test_of_inputs_in_ever_new_places_few_get_a_graph(model: Executable, put: Put, host: HostDriver) -> None:
    made = host.calls["cuGraphInstantiate"]
    places = [put(drawn(seed)) for seed in range(6)]
    for _ in range(200):
        for seed, place in enumerate(places):
            assert np.array_equal(on_the_host(model(place)), drawn(seed))
    destroyed = host.calls["cuGraphExecDestroy"]
    kept = host.calls["cuGraphInstantiate"] - made - destroyed
    assert kept <= 8 >= destroyed
    model.close()
    assert host.calls["cuGraphExecDestroy"] == destroyed + kept + 1


def test_arrays_that_lie_as_the_program_reads_them_are_read_where_they_are(model: Executable, put: Put) -> None:
    """And outputs are written where the caller gets them; what a replay repeats is the call before."""
    place = put(laid_out(drawn(0), ORDERS["channels last"]))
    kept = []
    for seed in range(80):
        place.copy_(torch.from_numpy(drawn(seed)))
        found = model(place)
        assert np.array_equal(on_the_host(found), drawn(seed))
        if seed % 8 == 0:
            kept.append((seed, found))
        place.zero_()
        del found
    for seed, output in kept:
        assert np.array_equal(on_the_host(output), drawn(seed))
    view = model.run({"x": put(drawn(99))}, reuse_outputs=True)["y"]
    place.copy_(torch.from_numpy(drawn(79)))
    model(place)
    place.zero_()
    model.replay()
    assert np.array_equal(on_the_host(view), drawn(79))


@on_host
def test_a_number_may_come_on_the_gpu(put: Put) -> None:
    with nimblert.load(copying((), (), "int64")) as model:
        number = put(np.array(0))
        for value in range(40):
            assert on_the_host(model(number.fill_(value))) == value
        model.bind("x", number.fill_(7))
        model.launch()
        assert on_the_host(model.run({})["y"]) == 7


@on_host
def test_such_a_call_is_one_launch_and_copies_nothing(model: Executable, put: Put, host: HostDriver) -> None:
    place = put(laid_out(drawn(0), ORDERS["channels last"]))
    for _ in range(40):
        model(place)
    copies, launches = len(host.copies), host.calls["cuGraphLaunch"]
    assert np.array_equal(on_the_host(model(place)), drawn(0))
    assert (len(host.copies), host.calls["cuGraphLaunch"]) == (copies, launches + 1)


@on_host
def test_what_a_program_writes_is_never_the_callers_input(put: Put) -> None:
    plan = copying(SHAPE, ORDERS["contiguous"])
    (program,) = plan.programs
    first = program.commands[0]
    assert isinstance(first, Memcpy)
    fill = Memset(dst=first.src, value=0, element_nbytes=1, count=first.nbytes, stream=0, op=0)
    program = replace(program, commands=(*program.commands, fill))
    with nimblert.load(replace(plan, programs=(program,))) as model:
        tensor = put(drawn(1))
        for _ in range(80):
            assert np.array_equal(on_the_host(model(tensor)), drawn(1))
        assert np.array_equal(on_the_host(tensor), drawn(1))


@on_host
def test_an_output_that_the_program_overwrites_may_be_its_next_input(put: Put) -> None:
    """Here two outputs are in one place, so that they are always written there."""
    plan = copying((2, 8), (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    first, second = (replace(program.commands[0], nbytes=32, src=x.pointer, dst=y.pointer) for _ in range(2))
    first = replace(first, src=replace(x.pointer, offset=32))
    second = replace(second, dst=replace(y.pointer, offset=32))
    program = replace(program, commands=(first, second), outputs=(y, replace(y, name="again")))
    with nimblert.load(replace(plan, programs=(program,))) as model:
        view = torch.from_dlpack(model.run({"x": put(drawn(0, (2, 8)))}, reuse_outputs=True)["y"])
        for seed in range(80):
            view.copy_(torch.from_numpy(drawn(seed, (2, 8))))
            found, _ = model(view)
            assert np.array_equal(on_the_host(found), drawn(seed, (2, 8))[::-1])


@on_host
def test_outputs_in_the_same_memory_or_an_inputs_are_each_an_array_of_its_own(put: Put) -> None:
    plan = copying(SHAPE, ORDERS["contiguous"])
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    outputs = (y, replace(y, name="again"), replace(x, name="same"))
    with nimblert.load(replace(plan, programs=(replace(program, outputs=outputs),))) as model:
        tensor, kept = put(drawn(0)), []
        for seed in range(80):
            found = model(tensor.copy_(torch.from_numpy(drawn(seed))))
            assert all(np.array_equal(on_the_host(each), drawn(seed)) for each in found)
            kept.append((seed, found[seed % 3]))
            kept = kept[-5:]
        tensor.zero_()
        assert all(np.array_equal(on_the_host(each), drawn(seed)) for seed, each in kept)


@on_host
def test_a_program_without_work_returns_its_inputs(put: Put) -> None:
    plan = copying(SHAPE, ORDERS["channels last"])
    (program,) = plan.programs
    outputs = (replace(program.inputs[0], name="same"),)
    with nimblert.load(replace(plan, programs=(replace(program, commands=(), outputs=outputs),))) as model:
        for seed in range(40):
            assert np.array_equal(model(drawn(seed)), drawn(seed))
        tensor = put(drawn(0))
        for seed in range(40):
            assert np.array_equal(on_the_host(model(tensor.copy_(torch.from_numpy(drawn(seed))))), drawn(seed))


@on_host
@pytest.mark.parametrize(
    ("refused", "shape"),
    [
        *((name, SHAPE) for name in ("cuGraphInstantiate", "cuGraphAddDependencies", "cuGraphAddKernelNode")),
        ("cuGraphAddMemcpyNode", LARGER),
    ],
)
def test_calls_go_on_where_no_memory_is_left_for_a_graph_of_their_own(
    put: Put, host: HostDriver, refused: str, shape: tuple[int, ...]
) -> None:
    place = put(laid_out(drawn(0, shape), ORDERS["channels last"]))
    with nimblert.load(copying(shape, ORDERS["channels last"]), poison=True) as model:
        model(put(drawn(0, shape)))  # calls in one piece are made by one that is not
        host.failing[refused] = host.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        before = host.calls.get(refused, 0)
        for seed in range(70):
            for value in (drawn(seed, shape), place.copy_(torch.from_numpy(drawn(seed, shape)))):
                assert np.array_equal(on_the_host(model(value)), drawn(seed, shape))
        assert 2 <= host.calls[refused] - before <= 6
        assert host.calls["cuGraphDestroy"] == host.calls["cuGraphCreate"]
        host.failing.clear()
        launched = host.calls.get("cuMemcpyHtoDAsync", 0)
        for seed in range(400):
            assert np.array_equal(model(drawn(seed, shape)), drawn(seed, shape))
        assert host.calls["cuMemcpyHtoDAsync"] - launched < 400


@on_host
@pytest.mark.parametrize(
    ("shape", "dtype", "node"),
    [
        ((33,), "uint8", "cuGraphAddKernelNode"),
        ((3, 5), "float16", "cuGraphAddKernelNode"),
        ((1, 3, 16, 24), "float32", "cuGraphAddKernelNode"),
        ((1 << 19,), "uint8", "cuGraphAddKernelNode"),
        (((1 << 19) + 1,), "uint8", "cuGraphAddMemcpyNode"),
    ],
)
def test_little_is_copied_by_kernels_and_more_by_the_copy_engine(
    put: Put, host: HostDriver, shape: tuple[int, ...], dtype: str, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del put
    monkeypatch.setattr(early, "_IN_ORDER", False)  # else kernels bring what is launched before
    plan = copying(shape, range(len(shape)), dtype)
    with nimblert.load(plan) as model:
        before = dict(host.calls)
        for seed in range(12):
            x = np.random.default_rng(seed).integers(0, 99, shape).astype(dtype)
            found = model(x)
            assert np.array_equal(found, x)
        made = Counter({name: host.calls.get(name, 0) - before.get(name, 0) for name in NODES})
    graphs = host.calls["cuGraphInstantiate"] - before["cuGraphInstantiate"]
    is_small = plan.programs[0].outputs[0].span_nbytes <= 1 << 12  # its memory is always the same
    assert graphs == 1 if is_small else graphs >= 2
    transfers = Counter({node: 2 * graphs - (not is_small)})  # without that the first graph brings inputs alone
    assert made == transfers + Counter({"cuGraphAddMemcpyNode": graphs * len(list(plan.programs[0].work))})


@on_host
def test_large_inputs_are_uploaded_piece_by_piece(put: Put, host: HostDriver) -> None:
    del put
    shape = (1, 3, 512, 512)
    with nimblert.load(copying(shape, ORDERS["contiguous"])) as model:
        for seed in range(6):
            x = np.random.default_rng(seed).random(shape, np.float32)
            assert np.array_equal(model(x), x)
        assert host.calls["cuGraphInstantiate"] == 1


def test_a_large_input_with_the_gaps_that_the_program_expects(put: Put) -> None:
    del put
    rows, width, room = 600, 1000, 1040
    plan = copying((rows, room), (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    x, y = (replace(tensor, shape=(rows, width)) for tensor in (x, y))
    with nimblert.load(replace(plan, programs=(replace(program, inputs=(x,), outputs=(y,)),)), poison=True) as model:
        for seed in range(6):
            array = drawn(seed, (rows, room))[:, :width]
            assert array.strides == (room * 4, 4)
            assert np.array_equal(model(array), array)
            assert np.array_equal(model(array.copy()), array)


@on_host
def test_no_thread_copies_on_when_the_upload_of_a_large_input_has_failed(
    put: Put, host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write where the next call's input is."""
    del put
    shape = (1, 3, 1024, 1024)
    with nimblert.load(copying(shape, ORDERS["contiguous"])) as model:
        model(np.zeros(shape, np.float32))
        begun: list[int] = []
        ended: list[int] = []
        copy, first = np.copyto, threading.get_ident()

        def slow(*arrays: np.ndarray) -> None:
            begun.append(0)
            time.sleep(0 if len(begun) == 1 or threading.get_ident() == first else 0.2)
            copy(*arrays)
            ended.append(0)

        monkeypatch.setattr(np, "copyto", slow)
        host.failing["cuMemcpyHtoDAsync"] = host.CUresult.CUDA_ERROR_UNKNOWN
        with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
            model(np.ones(shape, np.float32))
        assert 0 < len(begun) == len(ended) < 12


def test_outputs_of_earlier_calls_stay(model: Executable, put: Put) -> None:
    arrays = [drawn(seed) for seed in range(4)]
    found = [model(put(x) if seed % 2 else x) for seed, x in enumerate(arrays)]
    for x, output in zip(arrays, found, strict=True):
        assert np.array_equal(on_the_host(output), x)


def test_what_is_wrong_is_refused_as_in_a_first_call(model: Executable, put: Put, taken: list[bool]) -> None:
    for value, sentence in (
        (drawn(0).astype(np.float64), "dtype float64, expected float32"),
        (drawn(0)[:2], r"shape \(2, 3, 32, 24\), expected"),
        (put(drawn(0).astype(np.int32)), "dtype int32, expected float32"),
        (put(drawn(0)[:, :2]), r"shape \(4, 2, 32, 24\), expected"),
        (put(drawn(0)).requires_grad_(), "does not come by DLPack: .*requires? grad"),
        (torch._neg_view(put(drawn(0))), r"it is a negated view: give what .resolve_neg\(\) returns"),
        ([1.0], "got list, expected a numpy array"),
    ):
        with pytest.raises(InputError, match=rf"^input 'x': .*{sentence}"):
            model.run({"x": value})
    with pytest.raises(InputError, match="'z' is not one of the plan's inputs"):
        model.run({"z": put(drawn(0))})
    with pytest.raises(InputError, match="missing"):
        model.run({})
    assert not any(taken)
    assert np.array_equal(on_the_host(model(torch._neg_view(put(drawn(3))).resolve_neg())), -drawn(3))
    assert np.array_equal(on_the_host(model(put(drawn(3)))), drawn(3))
    assert taken[-1]


def test_what_changes_the_context_ends_it(model: Executable, put: Put, taken: list[bool]) -> None:
    tensor = put(laid_out(drawn(1), (0, 1, 2, 3)))
    model(tensor)
    model.bind("x", channels_last(put(drawn(2))))
    assert np.array_equal(on_the_host(model.run({})["y"]), drawn(2))
    with pytest.raises(InputError, match="'x' is bound"):
        model(tensor)
    model.bind("x", None)
    assert np.array_equal(on_the_host(model(tensor)), drawn(1))
    assert taken == [True]  # the rest looked at everything


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
def test_an_array_for_what_is_closed_is_left_alone(model: Executable, put: Put, use: Callable[..., object]) -> None:
    """Its stream is not asked to wait by an event that is gone, of which drivers crash."""
    model.close()
    with pytest.raises(InputError, match="is closed"):
        use(model, put(drawn(1)))


@on_host
def test_it_runs_on_the_librarys_stream_after_what_was_launched(
    model: Executable, put: Put, host: HostDriver, taken: list[bool]
) -> None:
    model.launch(0x77)
    host.waits.clear()
    model(put(drawn(1)))
    assert taken == [True]
    assert host.waits[0] == (0, 0x77)  # torch's own stream of the CPU is 0


@on_host
def test_a_launch_that_fails_is_an_error_and_the_next_call_runs(
    model: Executable, put: Put, host: HostDriver, taken: list[bool]
) -> None:
    for value in (drawn(1), put(drawn(1))):
        host.failing["cuGraphLaunch"] = host.CUresult.CUDA_ERROR_UNKNOWN
        synchronised = host.calls.get("cuStreamSynchronize", 0)
        with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN"):
            model(value)
        assert host.calls["cuStreamSynchronize"] > synchronised
        host.failing.clear()
        assert np.array_equal(on_the_host(model(value)), drawn(1))
    assert True in taken


@on_host
def test_a_fake_tensor_is_refused_after_tensors_too(model: Executable, put: Put) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(put(laid_out(drawn(0), order))) for order in ORDERS.values()]
    for order in ORDERS.values():
        model(put(laid_out(drawn(0), order)))
    for fake in (*fakes, *fakes):
        with pytest.raises(InputError, match=r"input 'x': .*it has no memory, as a fake tensor has none"):
            model(fake)
    zeros = torch._efficientzerotensor(SHAPE)
    assert type(zeros) is torch.Tensor
    with pytest.raises(InputError, match=r"input 'x': .*it has no memory"):
        model(zeros)


@on_host
def test_an_array_that_begins_within_an_element_is_refused(model: Executable, put: Put) -> None:
    """A kernel that reads it ends the use of CUDA in the process."""
    memory = np.zeros(drawn(0).nbytes + 4, np.uint8)
    for start in (4, 1, 2):
        array = memory[start : start + drawn(0).nbytes].view(np.float32).reshape(SHAPE)
        array[...] = drawn(start)
        interface = {**array.__array_interface__, "stream": None}
        for value in (torch.from_numpy(array), SimpleNamespace(__cuda_array_interface__=interface)):
            for _ in range(2):
                if start == 4:
                    assert np.array_equal(on_the_host(model(value)), array)
                    continue
                with pytest.raises(InputError, match=r"'x': address 0x[0-9a-f]+, expected a multiple of 4"):
                    model(value)
                with pytest.raises(InputError, match=r"'y': address 0x[0-9a-f]+, expected a multiple of 4"):
                    model.run({"x": put(drawn(0))}, out={"y": value})


@on_host
@pytest.mark.parametrize("refused", ["cuMemAlloc", "cuEventCreate", "cuStreamWaitEvent"])
def test_an_output_that_cannot_be_had_leaves_nothing_behind(put: Put, host: HostDriver, refused: str) -> None:
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        tensor = put(drawn(1))
        for _ in range(2):
            on_the_host(model(tensor))
        held = [] if refused == "cuStreamWaitEvent" else [model(tensor)]
        allocated, events = len(host.allocated), host.calls["cuEventCreate"] - host.calls.get("cuEventDestroy", 0)
        for _ in range(3):
            host.failing[refused] = host.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            with pytest.raises(CudaError, match=refused):
                model(tensor)
            host.failing.clear()
        assert len(host.allocated) == allocated
        if refused == "cuMemAlloc":
            assert host.calls["cuEventCreate"] - host.calls.get("cuEventDestroy", 0) == events
        assert np.array_equal(on_the_host(model(tensor)), drawn(1))
        held.clear()
    assert not host.allocated


@on_host
def test_only_memory_that_others_may_use_is_waited_for(put: Put, host: HostDriver) -> None:
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
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
        torch.from_dlpack(model(tensor))
        host.failing["cuStreamWaitEvent"] = host.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(CudaError, match="cuStreamWaitEvent"):
            model(tensor)
        host.failing.clear()
        assert (waits(), waits()) == (1, 0)


@on_host
def test_an_output_is_not_lent_again_before_its_download_has_ended(
    put: Put, host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where that of the next one of the same call is refused."""
    del put
    plan = copying(SHAPE, ORDERS["contiguous"])
    (program,) = plan.programs
    (y,) = program.outputs
    second = replace(y, name="z", shape=(2000,), strides=(1,), pointer=replace(y.pointer, index=1))
    program = replace(program, outputs=(y, second), output_nbytes=(*program.output_nbytes, 8000))
    events: list[str] = []
    wait = host.cuStreamSynchronize
    monkeypatch.setattr(host, "cuStreamSynchronize", lambda stream: (events.append("waited"), wait(stream))[1])
    with nimblert.load(replace(plan, programs=(program,))) as model:
        kept = [model(drawn(0))[1] for _ in range(2)]
        give_back = PageLockedPool.give_back

        def noting(*args: Any, **kwargs: Any) -> None:
            events.append("given back")
            give_back(*args, **kwargs)

        monkeypatch.setattr(PageLockedPool, "give_back", noting)
        download = host.cuMemcpyDtoHAsync

        def refuse_the_second(to: int, source: int, nbytes: int, stream: object) -> Any:
            return download(to, source, nbytes, stream) if nbytes > 8000 else (host.CUresult.CUDA_ERROR_UNKNOWN,)

        monkeypatch.setattr(host, "cuMemcpyDtoHAsync", refuse_the_second)
        events.clear()
        with pytest.raises(CudaError, match="cuMemcpyDtoHAsync"):
            model(drawn(1))
        assert events == ["waited", "waited", "given back", "given back"]
        kept.clear()


def test_it_is_made_once_for_calls_of_any_kind(model: Executable, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeviceDirect, "__init__")  # whoever makes another one fails
    for seed in range(3):
        x = drawn(seed)
        found = model.run({"x": put(x)}, reuse_outputs=True)["y"]
        assert np.array_equal(on_the_host(found), x)
        out = np.empty(SHAPE, np.float32)
        model.run({"x": x}, out={"y": out})
        assert np.array_equal(out, x)
        assert np.array_equal(on_the_host(model(put(x))), x)
    with pytest.raises(TypeError):
        DeviceDirect(*[None] * 4)
