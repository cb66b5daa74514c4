"""A process for each device: results and errors are those of `load`, and a lost process is one device less."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from concurrency import at_once
from cpu_plans import bent_sum, floats, plan_file, write_model
from memory_use import current
from onnx import TensorProto, helper
from plans import cpu_plan, cuda_plan
from process_pools import calls_of, child, copying, file_count, gone, hung_up, pids, pool_of, stopped, until, weighted
from programs import bare
from sized_plans import sized

from nimblec.plan import encoder
from nimblert import (
    CudaError,
    DeviceLostError,
    DeviceMismatchError,
    Executable,
    InputError,
    NimbleError,
    PlanFormatError,
    PlanInvalidError,
    golden,
    load,
    load_pool,
)
from nimblert.plan import Plan, Pointer, Region, Weight
from nimblert.processes import ProcessPool
from nimblert.processes.channel import LONGEST_NBYTES, Channel, Memory, Place, ends, error_message, error_of

node = helper.make_node


def numbers(seed: int = 1) -> dict[str, np.ndarray]:
    """Inputs of `cpu_plan`."""
    return {"x": np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32), "index": np.arange(4)}


def rows(count: int) -> dict[str, np.ndarray]:
    """Inputs of `sized`."""
    x = np.arange(3 * count, dtype=np.int32)
    return {"x": x.reshape(count, 3), "w": x[: 2 * count].reshape(2, count) + 7}


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """Of `sized`; tests leave it as it was."""
    with pool_of(sized(2, 4, 8)) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Iterator[Executable]:
    with load(sized(2, 4, 8)) as made:
        yield made


DTYPES = ("float16", "bfloat16", "float64", "int8", "uint16", "int64", "bool", "complex64")
SHAPES = ((2, 3, 5), (0, 4), (), (7,))


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == array.dtype and found[name].shape == array.shape and np.array_equal(found[name], array)
        for name, array in expected.items()
    )


@pytest.mark.parametrize("count", [2, 3, 8, 21, 1000])
def test_calls_of_any_size_are_those_of_a_loaded_plan(pool: ProcessPool, model: Executable, count: int) -> None:
    arrays = rows(count)
    for _ in range(3):
        assert same(pool.run(arrays), model.run(arrays))
    assert np.array_equal(pool(arrays["x"], w=arrays["w"])[1], arrays["w"])


def test_entries_dtypes_and_shapes(tmp_path: Path) -> None:
    plan = bare(*(copying(f"{dtype} {shape}", dtype, shape) for dtype in DTYPES for shape in SHAPES))
    encoder.write(plan, tmp_path / "m.plan")
    with pool_of(tmp_path / "m.plan", 1) as pool, load(plan) as model:
        assert pool.entries == model.entries
        for entry, program in zip(pool.entries, plan.programs, strict=True):
            x = golden.draw_inputs(program, 3)
            assert same(pool.run(x, entry=entry), model.run(x, entry=entry))


def test_arrays_in_any_layout_and_of_other_libraries(pool: ProcessPool) -> None:
    wide = np.arange(4 * 6, dtype=np.int32).reshape(4, 6)
    w = rows(4)["w"]
    for x in (wide[:, ::2], wide[:, 2::-1], np.asfortranarray(wide[:, :3]), torch.from_numpy(wide)[:, :3]):
        assert np.array_equal(pool.run({"x": x, "w": w})["y"], x)


def test_results_are_new_arrays_or_those_given(pool: ProcessPool) -> None:
    arrays = rows(4)
    first = pool.run(arrays)
    kept = {name: array.copy() for name, array in first.items()}
    given = np.zeros((4, 6), np.int32)[:, ::2]
    found = pool.run(rows(4) | {"x": arrays["x"] + 1}, out={"y": given})
    assert found["y"] is given
    assert np.array_equal(given, arrays["x"] + 1)
    assert list(found) == ["y", "z"]
    assert same(first, kept)
    assert all(array.flags.writeable for array in first.values())


BAD: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"x": rows(4)["x"]}, {}),
    (rows(4) | {"x": np.zeros((4, 3))}, {}),
    (rows(4) | {"x": rows(5)["x"]}, {}),
    (rows(4) | {"x": "?"}, {}),
    (rows(0), {}),
    (rows(4), {"entry": "other"}),
    (rows(4), {"out": {"y": np.zeros((4, 4), np.int32)}}),
    (rows(4), {"out": []}),
)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_errors_are_those_of_a_loaded_plan(pool: ProcessPool, model: Executable, number: int) -> None:
    arrays, options = BAD[number]
    errors = []
    for one in (pool, model):
        with pytest.raises(InputError) as caught:
            one.run(arrays, **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_an_error_in_the_process_is_raised_here(tmp_path: Path) -> None:
    nodes = [node("Gather", ["table", "rows"], ["y"])]
    table = {"table": np.eye(3, dtype=np.float32)}
    outputs = [floats("y", 2, 3)]
    path = write_model(tmp_path / "m.onnx", nodes, [("rows", TensorProto.INT64, [2])], outputs, constants=table)
    plan = plan_file(path)
    with pool_of(plan, 1) as pool, load(plan) as model:
        for one in (pool, model):
            with pytest.raises(InputError, match="Gather"):
                one(np.array([0, 99]))
        assert np.array_equal(pool(np.array([2, 0])), table["table"][[2, 0]])


class OnGpu:
    """An array on a GPU, as far as it tells."""

    __cuda_array_interface__: ClassVar = {
        "version": 3, "shape": (4, 3), "typestr": "<i4", "data": (64, False), "strides": None, "stream": None
    }  # fmt: skip


def test_arrays_on_a_gpu_are_refused(pool: ProcessPool) -> None:
    sentence = "it is on a GPU, and the arrays of a call go to another process: give a numpy array, or load the pool"
    with pytest.raises(InputError, match=f"^input 'x': {sentence}"):
        pool.run(rows(4) | {"x": OnGpu()})
    with pytest.raises(InputError, match=f"^out 'y': {sentence}"):
        pool.run(rows(4), out={"y": OnGpu()})


def test_threads_and_tasks_get_their_own_answers(pool: ProcessPool) -> None:
    def calls(thread: int) -> None:
        for step in range(60):
            arrays = rows(1 + (thread + step) % 11)
            arrays["x"] = arrays["x"] + thread
            assert np.array_equal(pool.run(arrays)["y"], arrays["x"])

    at_once(16, calls)

    async def every() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(pool.arun(rows(count)) for count in range(1, 30)))

    assert all(same(found, {"y": rows(n)["x"], "z": rows(n)["w"]}) for n, found in enumerate(asyncio.run(every()), 1))


def test_tasks_take_no_threads_and_their_calls_keep_their_order() -> None:
    order: list[int] = []

    async def call(number: int) -> None:
        await pool.arun(rows(2))
        order.append(number)

    async def every() -> int:
        with stopped(pool):
            calls = [asyncio.ensure_future(call(number)) for number in range(100)]
            await asyncio.sleep(0)  # they all begin
            until(lambda: calls_of(pool) == (1, 99))
            during = threading.active_count()
        await asyncio.gather(*calls)
        return during

    with pool_of(sized(2, 4), 1, 1) as pool:
        before = threading.active_count()
        assert asyncio.run(every()) == before
    assert order == list(range(100))


def test_large_arrays_are_copied_beside_small_calls() -> None:
    plan = bare(copying("large", "float32", (400_000,)), copying("small", "float32", (4,)))

    def arrays(seed: int, entry: str) -> dict[str, np.ndarray]:
        count = 400_000 if entry == "large" else 4
        return {"x": np.arange(seed, seed + count, dtype=np.float32)}

    with pool_of(plan) as pool:

        def calls(thread: int) -> None:
            entry = "small" if thread % 2 else "large"
            for step in range(20):
                given = arrays(thread + 8 * step, entry)
                assert same(pool.run(given, entry=entry), {"y": given["x"]})

        at_once(8, calls)
        with stopped(pool), ThreadPoolExecutor(4) as threads:
            lost = [threads.submit(pool.run, arrays(0, "large"), entry="large") for _ in range(4)]
            until(lambda: len(pool._dispatcher._sent) == 4)
            for pid in pids(pool):
                os.kill(pid, signal.SIGKILL)
            assert all("was ended by SIGKILL during this call" in str(call.exception(20)) for call in lost)


def test_a_cancelled_task_leaves_its_call_and_a_closed_loop_its_answer() -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(pool.arun(rows(2)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pool_of(sized(2, 4), 1) as pool:
        with stopped(pool):
            asyncio.run(cancelled())
            until(lambda: pool._all[0].in_flight == 1)
        until(lambda: pool._all[0].in_flight == 0)
        assert same(asyncio.run(pool.arun(rows(2))), {"y": rows(2)["x"], "z": rows(2)["w"]})
        with pytest.raises(InputError, match="missing"):
            asyncio.run(pool.arun({"x": rows(2)["x"]}))


def test_an_interrupted_call_writes_no_output_later(tmp_path: Path) -> None:
    code = """
y = np.zeros(4, np.float32)
for process in pool._all:
    stop(process._popen.pid)
try:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    pool.run({"x": x}, out={"y": y})
except KeyboardInterrupt:
    print("interrupted")
for process in pool._all:
    os.kill(process._popen.pid, signal.SIGCONT)
assert np.array_equal(pool(x), expected)
pool.close()
print(y.any())
"""
    with child(bent_sum(tmp_path), code) as process:
        out, err = process.communicate(timeout=30)
    assert (out.splitlines()[1:], err) == (["interrupted", "False"], "")


def test_a_process_that_ends_between_calls_is_out_of_service_at_once() -> None:
    with pool_of(sized(2, 4)) as pool:
        os.kill(pids(pool)[1], signal.SIGKILL)
        until(lambda: len(pool.devices) == 1)
        until(lambda: not Path(f"/proc/{pids(pool)[1]}").exists())
        assert same(pool.run(rows(2)), {"y": rows(2)["x"], "z": rows(2)["w"]})


def test_a_call_takes_the_process_with_the_fewest_in_flight(pool: ProcessPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        with stopped(pool):
            calls = [threads.submit(pool.run, rows(2)) for _ in range(3)]
            until(lambda: calls_of(pool) == (3, 0))
            assert sorted(process.in_flight for process in pool._all) == [1, 2]
            calls += [threads.submit(pool.run, rows(2)) for _ in range(5)]
            until(lambda: calls_of(pool) == (4, 4))
            assert [process.in_flight for process in pool._all] == [2, 2]
        assert all(np.array_equal(call.result(20)["y"], rows(2)["x"]) for call in calls)


def test_a_killed_process_costs_its_calls_and_no_others() -> None:
    arrays = [numbers(seed) for seed in range(8)]
    with pool_of(cpu_plan()) as pool:
        expected = [pool.run(given) for given in arrays]
        ended = threading.Event()
        lost: list[str] = []
        right = [0] * 8

        def calls(thread: int) -> None:
            while not ended.is_set():
                try:
                    assert same(pool.run(arrays[thread]), expected[thread])
                    right[thread] += 1
                except DeviceLostError as exc:
                    lost.append(str(exc))

        with ThreadPoolExecutor(8) as threads:
            running = [threads.submit(calls, thread) for thread in range(8)]
            until(lambda: min(right) > 20)
            os.kill(pids(pool)[1], signal.SIGKILL)
            until(lambda: pool.devices == (0,))
            before = list(right)
            until(lambda: all(now > then + 20 for now, then in zip(right, before, strict=True)))
            ended.set()
            for one in running:
                one.result(20)
        sentence = "device 0: its process was ended by SIGKILL during this call: later calls go to the other devices"
        assert set(lost) <= {sentence}
        assert len(lost) <= 2
        os.kill(pids(pool)[0], signal.SIGTERM)  # a service manager's, which the pool decides on
        assert same(pool.run(arrays[0]), expected[0])
        os.kill(pids(pool)[0], signal.SIGSEGV)
        until(lambda: hung_up(pool._all[0]))
        sentence = r"^no device of this pool is in service \(.*by SIGSEGV; .*by SIGKILL\): load the plan again"
        for _ in range(3):
            with pytest.raises(DeviceLostError, match=sentence):
                pool.run(arrays[0])
        with pytest.raises(DeviceLostError, match="no device"):
            pool.refit({})


def test_calls_of_a_lost_process_end_and_those_that_wait_for_it_do_too() -> None:
    with pool_of(cpu_plan(), 1) as pool, ThreadPoolExecutor(5) as threads:
        with stopped(pool):
            calls = [threads.submit(pool.run, numbers()) for _ in range(5)]
            until(lambda: calls_of(pool) == (2, 3))
            os.kill(pids(pool)[0], signal.SIGKILL)
            texts = sorted(str(call.exception(20)) for call in calls)
        assert texts[:2] == ["device 0: its process was ended by SIGKILL during this call: load the plan again"] * 2
        assert all(text.startswith("no device of this pool is in service") for text in texts[2:])
        assert all(isinstance(call.exception(), DeviceLostError) for call in calls)


def test_a_final_cuda_error_takes_the_device_out_of_service() -> None:
    control, ours = (Channel(end) for end in ends())
    code = (
        "import socket, sys; from nimblert import CudaError; from nimblert.processes import channel, worker;"
        "control = channel.Channel(socket.socket(fileno=int(sys.argv[1])));"
        "worker._answer(CudaError('cuEventSynchronize', sys.argv[2]), control)"
    )
    for result, status in (("CUDA_ERROR_ILLEGAL_ADDRESS", 1), ("CUDA_ERROR_OUT_OF_MEMORY", 0)):
        file = ours.socket.fileno()
        done = subprocess.run([sys.executable, "-c", code, str(file), result], pass_fds=[file], check=False, timeout=60)
        assert done.returncode == status
    ours.end()
    error = error_of(control.receive())
    assert isinstance(error, CudaError)
    assert (error.api, error.result) == ("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert control.receive() == b""
    control.end()


@pytest.mark.parametrize(
    "error",
    [
        InputError("input 'x': ä"), CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"), MemoryError("full"),
        PlanInvalidError(["a", "b", "c", "d"]), DeviceMismatchError("no GPU"), PlanFormatError("cut"),
    ],
)  # fmt: skip
def test_errors_keep_class_and_text(error: Exception) -> None:
    found = error_of(error_message(error))
    assert (type(found), str(found)) == (type(error), str(error))
    assert str(error_of(error_message(ZeroDivisionError("x" * 10**6)))).startswith("ZeroDivisionError: xxx")
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50)
    assert isinstance(error_of(error_message(numpys.value)), MemoryError)
    assert len(error_message(InputError("\U0001f600" * 10**6))) < LONGEST_NBYTES


@pytest.mark.parametrize("rows", [1 << 50, 1 << 62])
def test_more_shared_memory_than_any_machine_has_is_refused_at_once(rows: int) -> None:
    memory, place = Memory(), Place("x", np.dtype(np.float32), (rows, 4), 0)
    with pytest.raises(InputError, match=rf"^arrays: {16 * rows:,} bytes of shared memory cannot be had: "):
        memory.arrays([place])
    assert memory.arrays([Place("x", np.dtype(np.float32), (2, 4), 0)])[0].shape == (2, 4)


SHARED = Path("/dev/shm")  # noqa: S108 - where shared memory with a name is

def test_where_the_caller_is_killed_nothing_is_left(tmp_path: Path) -> None:
    before = set(SHARED.iterdir())
    with child(bent_sum(tmp_path), "time.sleep(60)") as process:
        assert process.stdout is not None
        workers = [int(text) for text in process.stdout.readline().split()]
        assert not any(map(gone, workers))
        process.kill()
        process.communicate(timeout=20)
    assert len(workers) == 2
    until(lambda: all(map(gone, workers)))
    assert set(SHARED.iterdir()) <= before


CALLING = """
for _ in range(3):
    threading.Thread(target=lambda: [pool(x) for _ in iter(int, 1)], daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("code", ["", CALLING], ids=["idle", "daemon threads"])
def test_a_process_ends_in_order_with_an_open_pool(tmp_path: Path, code: str) -> None:
    with child(bent_sum(tmp_path), code) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert all(gone(int(text)) for text in out.split())


FORKS = """
import gc, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        pool(x)
    except nimblert.InputError as exc:
        print(str(exc).replace(str(os.getppid()), "N"))
    pool.close()
    del pool
    gc.collect()
    sys.exit(0)
print(os.waitpid(child, 0)[1], np.array_equal(pool(x), expected), flush=True)
if os.fork() == 0:
    time.sleep(60)
os._exit(0)
"""


def test_a_forked_process_is_refused_and_keeps_no_process_alive(tmp_path: Path) -> None:
    with child(bent_sum(tmp_path), FORKS, start_new_session=True) as process:
        assert process.stdout is not None
        workers, *lines = (process.stdout.readline().strip() for _ in range(3))
        until(lambda: all(gone(int(text)) for text in workers.split()))
        os.killpg(process.pid, signal.SIGKILL)
    assert lines == ["this pool was loaded in process N: load the plan again in this one", "0 True"]


INTERRUPTED = """
for process in pool._all:
    os.kill(process._popen.pid, signal.SIGINT)
    stop(process._popen.pid)
for count in range(6):  # four in flight, then two that wait for one of them to end
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        pool(x + 100 + count)
        print("not interrupted")
    except KeyboardInterrupt:
        pass
for process in pool._all:
    os.kill(process._popen.pid, signal.SIGCONT)
for count in range(20):
    assert np.array_equal(pool(x), expected)
end = time.monotonic() + 10
while any(process.in_flight for process in pool._all) and time.monotonic() < end:
    time.sleep(0.01)  # until the slots of the interrupted calls are free
print(sum(process.in_flight for process in pool._all), len(pool._dispatcher.waiting))
pool.close()
"""


def test_an_interrupted_call_leaves_no_answer_for_a_later_one(tmp_path: Path) -> None:
    with child(bent_sum(tmp_path), INTERRUPTED) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[1:] == ["0 0"]


def test_closing_waits_for_calls_and_refuses_those_that_wait_for_a_slot() -> None:
    pool = pool_of(sized(2, 4), 1)
    with ThreadPoolExecutor(6) as threads:
        with stopped(pool):
            calls = [threads.submit(pool.run, rows(2)) for _ in range(4)]
            until(lambda: calls_of(pool) == (2, 2))
            closing = threads.submit(pool.close)
            until(lambda: pool._dispatcher.is_closed)
            assert not closing.done()
        closing.result(20)
        ends = [call.exception(20) for call in calls]
    assert sum(end is None for end in ends) == 2
    assert sum(str(end) == "this pool is closed: load the plan again" for end in ends) == 2
    assert all(map(gone, pids(pool)))
    pool.close()
    for use in (lambda: pool.run(rows(2)), lambda: pool.refit({})):
        with pytest.raises(InputError, match="this pool is closed: load the plan again"):
            use()


def test_a_dropped_pool_ends_its_processes() -> None:
    pool = pool_of(sized(2, 4), 1)
    (pid,) = pids(pool)
    files = file_count()
    del pool
    gc.collect()
    assert gone(pid)
    assert file_count() < files


def test_a_closed_pool_keeps_no_file() -> None:
    gc.collect()
    files = file_count()
    with pool_of(sized(2, 4, 8)) as pool:
        pool.run(rows(3))
        assert file_count() > files
    assert file_count() <= files
    assert pool.devices


def test_weights_are_replaced_in_all_processes_between_calls() -> None:
    x, w = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    with pool_of(weighted()) as pool, ThreadPoolExecutor(4) as threads:
        assert set(pool.weights) == {"w"}
        with pytest.raises(InputError, match=r"weight 'w': shape \(63,\), expected \(64,\)"):
            pool.refit({"w": w[1:]})
        ended = threading.Event()

        def seen() -> list[float]:
            found = [0.0]
            while not ended.is_set():
                (value,) = set(pool(x).tolist())  # old and new weights are never mixed
                found.append(value)
            return found

        watching = [threads.submit(seen) for _ in range(4)]
        for value in range(1, 8):
            pool.refit({"w": np.full(128, value, np.float32)[::2]})
            assert [set(pool(x).tolist()) for _ in range(4)] == [{value}] * 4
        ended.set()
        for one in watching:
            assert one.result(20) == sorted(one.result())
        pool.refit({"w": w})
        assert all(np.array_equal(pool(x), w) for _ in range(4))


@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_process_cannot_change_none_does(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    with pool_of(weighted()) as pool:
        control = pool._all[broken].control
        send = control.send
        with monkeypatch.context() as patch:
            patch.setattr(control, "send", lambda message: send(message if len(message) == 1 else b"damaged"))
            with pytest.raises(NimbleError, match=r"^error: unpack requires a buffer of 8 bytes"):
                pool.refit({"w": w})
        assert not any(pool(x).any() for _ in range(4))
        pool.refit({"w": w})
        assert all(np.array_equal(pool(x), w) for _ in range(4))
        os.kill(pids(pool)[broken], signal.SIGKILL)
        pool.refit({"w": w + 1})
        assert all(np.array_equal(pool(x), w + 1) for _ in range(4))
        assert pool.devices == (0,)


def test_memory_does_not_grow(pool: ProcessPool) -> None:
    def calls(seed: int) -> None:
        for step in range(500):
            pool.run(rows(1 + (step * 37 + seed) % 400))

    def grown() -> int:
        before = current().anonymous
        at_once(2, calls)
        return current().anonymous - before

    at_once(2, calls)
    before = file_count(), threading.active_count()
    # What other tests left may come or go meanwhile in some rounds, what is not given back in all.
    assert any(grown() < 4 << 20 for _ in range(3))
    assert (file_count(), threading.active_count()) == before


def test_load_pool_with_processes(tmp_path: Path) -> None:
    path = bent_sum(tmp_path)
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    with load(path) as model:
        expected = model(x)
    for plan in (path, path.read_bytes(), model.plan):
        with load_pool(plan, processes=True, contexts=np.int64(1), warm=True, copy=True) as pool:
            assert pool.devices == (0,)
            assert repr(pool).startswith("ProcessPool(Program('main'")
            assert np.array_equal(pool(x), expected)
            assert [tensor.name for tensor in (*pool.inputs, *pool.outputs)] == ["x", "y"]
            with pytest.raises(InputError, match="a pool of processes has no contexts of this one"):
                pool.context()


def test_what_cannot_be_loaded_is_refused_as_by_load(tmp_path: Path) -> None:
    path = bent_sum(tmp_path)
    damaged = tmp_path / "damaged.plan"
    damaged.write_bytes(path.read_bytes()[:-1] + b"?")
    cases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (tmp_path / "none.plan", {}),
        (damaged, {}),
        (path, {"program": "other"}),
        (path, {"limits": 3}),
        (encoder.encode_file(cuda_plan()), {"device": 0}),
        (path, {"device": 1}),
    )
    for plan, options in cases:
        with pytest.raises(NimbleError) as plain:
            load(plan, **options)
        given = {"devices": [options.pop("device")]} if "device" in options else {}
        with pytest.raises(type(plain.value)) as pooled:
            load_pool(plan, processes=True, contexts=1, **given, **options)
        assert str(pooled.value) == str(plain.value)
    with pytest.raises(InputError, match="contexts: got 0, expected a number of at least 1"):
        load_pool(path, processes=True, contexts=0)
    with pytest.raises(InputError, match="the plan has state, which is each context's own: load it without processes"):
        load_pool(encoder.encode_file(stateful()), processes=True)


def stateful() -> Plan:
    """A run leaves x in the state."""
    program = copying("main", "float32", (4,))
    kept = replace(program.commands[0], dst=Pointer(region=Region.STATE))
    state = Weight(name="last", dtype="float32", shape=(4,), offset=0, data=memoryview(bytes(16)))
    return bare(replace(program, commands=(*program.commands, kept)), state=(state,), state_nbytes=16)


LOADING = """
import json, sys, time
from nimblert.processes import worker
worker._loaded = lambda given: time.sleep(60)
worker.main(json.dumps({"sockets": [int(sys.argv[1])]}))
"""


def test_a_process_whose_pool_is_gone_does_not_load_to_the_end() -> None:
    ours, theirs = ends()
    file = theirs.fileno()
    with subprocess.Popen([sys.executable, "-c", LOADING, str(file)], pass_fds=[file]) as process:
        theirs.close()
        ours.close()
        assert process.wait(20) == 0
