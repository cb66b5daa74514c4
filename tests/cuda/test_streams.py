"""Runs of programs on a GPU at once: on streams of the caller, in threads, contexts, and one arena.

Most tests run on a driver of host memory, too, where tensors of the CPU are said to be on the GPU.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pytest
from copying import ORDERS, SHAPE, copying, drawn, on_gpu, on_host
from host_driver import HostDriver

import nimblert
from nimblert import Arena, Executable, InputError
from nimblert.cuda import driver

pytest_plugins = ("gpu_memory",)
torch = pytest.importorskip("torch")

ROUNDS = 20


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


def test_a_run_on_a_stream_of_the_caller_is_not_waited_for(put: Callable[[np.ndarray], Any], model: Executable) -> None:
    x, y = put(drawn(0)), put(drawn(1))
    stream = torch.cuda.Stream() if x.is_cuda else 0x77
    outputs = []
    for seed in range(3):
        x = put(drawn(seed))
        if x.is_cuda:
            torch.cuda.synchronize()
        outputs.append(model.run({"x": x}, stream=getattr(stream, "cuda_stream", stream))["y"])
    assert model.run({"x": x}, out={"y": y}, stream=getattr(stream, "cuda_stream", stream))["y"] is y
    model.synchronize()
    for seed, output in enumerate(outputs):
        assert np.array_equal(torch.from_dlpack(output).cpu().numpy(), drawn(seed))
    assert torch.equal(y, x)
    assert np.array_equal(model(drawn(4)), drawn(4))
    with pytest.raises(InputError, match="stream: got 'fast', expected a handle"):
        model.run({"x": x}, stream="fast")


@on_host
def test_the_stream_of_each_thread_is_another(put: Callable[[np.ndarray], Any], host: HostDriver) -> None:
    """Of CU_STREAM_PER_THREAD, which has the same handle in all threads."""
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model, ThreadPoolExecutor(1) as other:
        x = put(drawn(0))
        model.run({"x": x}, stream=2)
        for use in (lambda: model.launch(2), lambda: model.launch(2), lambda: model.run({"x": x}, stream=2)):
            host.waits.clear()
            other.submit(use).result()
            assert (2, 2) in host.waits


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
@pytest.mark.parametrize("count", [0, 5])
def test_call_waits_until_the_run_before_has_read_its_input(
    model: Executable, put: Callable[[np.ndarray], Any], host: HostDriver, count: int
) -> None:
    """Both copy their inputs to the same page-locked memory."""
    del put
    for seed in range(count):
        model(drawn(seed))
    model.run({"x": drawn(0)}, stream=0x77)
    host.calls.clear()
    model(drawn(1))
    assert host.calls.get("cuEventSynchronize") == 1


@on_host
def test_stream_waits_for_shared_memory(put: Callable[[np.ndarray], Any], host: HostDriver) -> None:
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
def test_what_was_launched_is_closed_after_a_kernel_has_failed(model: Executable, host: HostDriver) -> None:
    model.launch()
    host.broken = True
    model.close()
