"""Pools: calls are spread over devices, each of which is an executable of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from copying import copying, drawn, on_host
from host_driver import HostDriver
from plans import cpu_plan

import nimblert
from nimblec.plan.refit_programs import refits_in_place
from nimblert import CudaError, DeviceMismatchError, Executable, ExecutablePool, InputError, load_pool
from nimblert.check.program_rules import keeps_state
from nimblert.plan import Memcpy, Plan, Pointer, Region, Weight

pytest_plugins = ("gpu_memory",)

SHAPE = (6, 8)
NBYTES = 6 * 8 * 4


def weighted() -> Plan:
    """Return a plan whose y is the weight "w", whatever x is."""
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    copy = Memcpy(dst=y.pointer, src=Pointer(region=Region.WEIGHTS), nbytes=NBYTES, stream=0, op=0)
    weight = Weight(name="w", dtype="float32", shape=SHAPE, offset=0, data=memoryview(drawn(0, SHAPE).tobytes()))
    refits = refits_in_place([replace(x, name="w", pointer=Pointer(region=Region.WEIGHTS))])
    return replace(
        plan, weights=(weight,), weights_nbytes=NBYTES, programs=(replace(program, commands=(copy,)),), refits=refits
    )


def counting() -> Plan:
    """Return a plan whose run leaves x in the state and returns what was there."""
    plan = copying(SHAPE, (0, 1))
    (program,) = plan.programs
    (x,), (y,) = program.inputs, program.outputs
    kept = Pointer(region=Region.STATE)
    commands = (
        Memcpy(dst=y.pointer, src=kept, nbytes=NBYTES, stream=0, op=0),
        Memcpy(dst=kept, src=x.pointer, nbytes=NBYTES, stream=0, op=0),
    )
    state = Weight(name="last", dtype="float32", shape=SHAPE, offset=0, data=memoryview(bytes(NBYTES)))
    return replace(
        plan, state=(state,), state_nbytes=NBYTES, programs=(replace(program, commands=commands, arena_nbytes=0),)
    )


def with_scratch() -> Plan:
    """Return a plan whose run copies x through memory that a kernel keeps for itself."""
    plan = counting()
    (program,), (state,) = plan.programs, plan.state
    return replace(
        plan, state=(replace(state, name=""),), programs=(replace(program, commands=program.commands[::-1]),)
    )


@contextmanager
def held() -> Iterator[Callable[[], list[int]]]:
    """Keep calls in flight until the block ends; the function returns the devices that have one."""
    release = threading.Event()
    began: list[int] = []
    run = Executable.run

    def slow(self: Executable, *args: Any, **kwargs: Any) -> Any:
        began.append(self.device)
        assert release.wait(30)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "run", slow)
        try:
            yield lambda: list(began)
        finally:
            release.set()


def until(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError


def answers(pool: ExecutablePool, x: np.ndarray) -> list[Any]:
    """Return the output of a call on each device."""
    return [executable(x) for executable in pool.executables]


def test_pool_calls_the_least_busy_device(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x = drawn(1, SHAPE)
    with load_pool(copying(SHAPE, (0, 1))) as pool, ThreadPoolExecutor(4) as threads:
        count = len(pool.devices)
        assert pool.devices == tuple(range(count))
        with held() as began:
            calls = []
            for number in range(2 * count):
                calls.append(threads.submit(pool.run, {"x": x}))
                until(lambda number=number: len(began()) == number + 1)
            assert sorted(began()) == sorted([*range(count), *range(count)])
        for call in calls:
            assert np.array_equal(call.result()["y"], x)
        assert np.array_equal(pool(x), x)


def test_pool_answers_each_thread_and_task(put: Callable[[np.ndarray], Any]) -> None:
    del put
    arrays = [drawn(seed, SHAPE) for seed in range(40)]

    async def every(pool: ExecutablePool) -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(pool.arun({"x": array}) for array in arrays))

    with load_pool(copying(SHAPE, (0, 1))) as pool, ThreadPoolExecutor(8) as threads:
        for array, result in zip(arrays, asyncio.run(every(pool)), strict=True):
            assert np.array_equal(result["y"], array)
        for array, found in zip(arrays, threads.map(pool, arrays), strict=True):
            assert np.array_equal(found, array)
        assert not pool._in_flight


def test_pool_describes_its_plan(put: Callable[[np.ndarray], Any]) -> None:
    del put
    with load_pool(weighted()) as pool, nimblert.load(weighted()) as executable:
        assert (pool.entries, pool.inputs, pool.outputs) == (executable.entries, executable.inputs, executable.outputs)
        assert pool.weights == executable.weights
        out = np.empty(SHAPE, np.float32)
        assert pool.run({"x": drawn(1, SHAPE)}, entry="main", out={"y": out})["y"] is out
        assert np.array_equal(out, drawn(0, SHAPE))


@on_host
def test_pool_raises_the_error_of_a_failed_kernel(host: HostDriver) -> None:
    """CUDA then refuses every later call of the process, on whatever GPU; closing works."""
    pool = load_pool(weighted())
    x = drawn(1, SHAPE)
    host.broken = True
    for use in (lambda: pool(x), lambda: pool.run({"x": x}), lambda: pool.refit({"w": x})):
        with pytest.raises(
            CudaError, match="this process can no longer use CUDA: load the plan in a new one"
        ) as raised:
            use()
        assert raised.value.is_final
    pool.close()


@on_host
def test_pool_goes_on_after_an_error_that_passes(host: HostDriver) -> None:
    x = drawn(1, SHAPE)
    with load_pool(copying(SHAPE, (0, 1))) as pool:
        host.failing["cuGraphLaunch"] = host.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            pool(x)
        with pytest.raises(InputError, match="input 'x'"):
            pool(x[1:])
        host.failing.clear()
        assert not pool._in_flight
        assert np.array_equal(pool(x), x)


def test_pool_refits_all_devices_or_none(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, w = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(weighted()) as pool:
        with pytest.raises(InputError, match=r"weight 'w': shape \(6, 7\), expected \(6, 8\)"):
            pool.refit({"w": w[:, 1:]})
        assert all(np.array_equal(found, drawn(0, SHAPE)) for found in answers(pool, x))
        pool.refit({"w": w})
        assert all(np.array_equal(found, w) for found in answers(pool, x))


@on_host
def test_pool_refuses_state(host: HostDriver) -> None:
    with pytest.raises(InputError, match=r"the plan has state, .*: load it on each, with load\(\)$"):
        load_pool(counting())
    assert not host.allocated


def test_pool_takes_scratch_memory_of_kernels(put: Callable[[np.ndarray], Any]) -> None:
    del put
    assert keeps_state(counting())
    assert not keeps_state(with_scratch())
    with load_pool(with_scratch(), devices=[0]) as pool:
        for seed in range(3):
            assert np.array_equal(pool.run({"x": drawn(seed, SHAPE)})["y"], drawn(seed, SHAPE))
    with nimblert.load(with_scratch()) as executable:
        assert not executable.state


def test_pool_refuses_calls_once_closed(put: Callable[[np.ndarray], Any]) -> None:
    del put
    pool = load_pool(weighted())
    pool.close()
    pool.close()
    for use in (lambda: pool(drawn(1, SHAPE)), lambda: pool.refit({"w": drawn(1, SHAPE)})):
        with pytest.raises(InputError, match="this executable is closed: load the plan again"):
            use()


def test_pool_close_waits_for_calls(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x = drawn(1, SHAPE)
    pool = load_pool(copying(SHAPE, (0, 1)))
    with ThreadPoolExecutor(1) as threads:
        with pool.executables[0]._lock:  # as within a call
            closing = threads.submit(pool.close)
            until(lambda: pool.executables[-1]._lock.closed is not None or len(pool.devices) == 1)
            assert not closing.done()
        closing.result(20)
    with pytest.raises(InputError, match="closed"):
        pool(x)


@on_host
def test_load_pool_takes_the_given_devices_or_all_that_fit(host: HostDriver) -> None:
    plan = copying(SHAPE, (0, 1))
    with load_pool(plan, devices=[1]) as pool:
        assert pool.devices == (1,)
    for devices in ([], 0, ["0"], [True]):
        with pytest.raises(InputError, match=r"devices: got .*, expected ordinals of GPUs"):
            load_pool(plan, devices=devices)  # type: ignore[arg-type]
    with pytest.raises(DeviceMismatchError, match="device 2: CUDA shows 2 here"):
        load_pool(plan, devices=[0, 2])
    other = replace(plan, device=replace(plan.device, compute_capability=(8, 0)))
    with pytest.raises(DeviceMismatchError, match=r"compute capability 8\.0"):
        load_pool(other)
    assert not host.allocated


@on_host
def test_load_pool_skips_a_device_that_cannot_run_the_plan(host: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    del host
    load = nimblert.loading.load

    def only_the_second(plan: Plan, *, device: int) -> Executable:
        if device == 0:
            raise DeviceMismatchError("another generation")
        return load(plan, device=device)

    monkeypatch.setattr(nimblert.loading, "load", only_the_second)
    with load_pool(copying(SHAPE, (0, 1))) as pool:
        assert pool.devices == (1,)
    with pytest.raises(DeviceMismatchError, match="another generation"):
        load_pool(copying(SHAPE, (0, 1)), devices=[0, 1])


def test_load_pool_loads_a_plan_for_the_cpu_once() -> None:
    with load_pool(cpu_plan(), threads=1) as pool:
        assert pool.devices == (0,)
