"""One plan on several devices: calls are spread, weights are replaced on all or none, a kernel that fails ends all."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from concurrency import interrupting
from copying import copying, drawn, on_host
from host_driver import HostDriver
from plans import cpu_plan

import nimblert
from nimblec.refit.programs import refits_in_place
from nimblert import CudaError, DeviceMismatchError, ExecutablePool, InputError, load_pool
from nimblert.context import Context
from nimblert.executable import Executable
from nimblert.plan import Memcpy, Plan, Pointer, Region, Weight
from nimblert.pool import keeps_state

pytest_plugins = ("gpu_memory",)

SHAPE = (6, 8)
NBYTES = 6 * 8 * 4


def weighted() -> Plan:
    """Y is the weight "w", whatever x is."""
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
    """A run leaves x in the state and returns what was there."""
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
    """A run copies x through memory that a kernel keeps for itself."""
    plan = counting()
    (program,), (state,) = plan.programs, plan.state
    return replace(
        plan, state=(replace(state, name=""),), programs=(replace(program, commands=program.commands[::-1]),)
    )


@contextmanager
def held() -> Iterator[Callable[[], list[int]]]:
    """Calls stay in flight until the block ends; the function tells the devices that have one."""
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


def test_calls_go_where_the_fewest_are_in_flight(put: Callable[[np.ndarray], Any]) -> None:
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


@on_host
def test_of_idle_devices_the_one_that_ran_least_is_next(host: HostDriver) -> None:
    del host
    x = drawn(1, SHAPE)
    with load_pool(copying(SHAPE, (0, 1))) as pool:
        devices = []
        run = Executable.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Executable, "run", lambda self, *a, **k: (devices.append(self.device), run(self, *a, **k))[1])
            for _ in range(4):
                pool.run({"x": x})
        assert devices == [0, 1, 0, 1]


def test_tasks_and_threads_get_their_own_answers(put: Callable[[np.ndarray], Any]) -> None:
    del put
    arrays = [drawn(seed, SHAPE) for seed in range(40)]

    async def every(pool: ExecutablePool) -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(pool.arun({"x": array}) for array in arrays))

    with load_pool(copying(SHAPE, (0, 1))) as pool, ThreadPoolExecutor(8) as threads:
        for array, result in zip(arrays, asyncio.run(every(pool)), strict=True):
            assert np.array_equal(result["y"], array)
        for array, found in zip(arrays, threads.map(pool, arrays), strict=True):
            assert np.array_equal(found, array)


@on_host
def test_a_kernel_that_failed_ends_every_use_but_closing(host: HostDriver) -> None:
    pool = load_pool(weighted())
    x = drawn(1, SHAPE)
    context = pool.context()
    host.broken = True
    sentence = r"ILLEGAL_ADDRESS; this process can no longer use CUDA: load the plan in a new one$"
    for use in (lambda: pool(x), pool.context, lambda: pool.refit({"w": x}), context.replay):
        for _ in pool.devices:
            with pytest.raises(CudaError, match=sentence):
                use()
    pool.close()
    with pytest.raises(InputError, match="this pool is closed"):
        pool(x)


@on_host
def test_an_error_that_passes_leaves_the_pool_as_it_was(host: HostDriver) -> None:
    x = drawn(1, SHAPE)
    with load_pool(copying(SHAPE, (0, 1))) as pool:
        host.failing["cuGraphLaunch"] = host.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(CudaError, match=r"OUT_OF_MEMORY; the GPU has not enough free memory: [a-z ]+ that use it$"):
            pool(x)
        with pytest.raises(InputError, match="input 'x'"):
            pool(x[1:])
        host.failing.clear()
        assert all(np.array_equal(pool(x), x) for _ in pool.devices)


def test_weights_are_replaced_on_all_devices_or_none(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, w = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(weighted()) as pool:
        assert set(pool.weights) == {"w"}
        with pytest.raises(InputError, match=r"weight 'w': shape \(6, 7\), expected \(6, 8\)"):
            pool.refit({"w": w[:, 1:]})
        assert all(np.array_equal(pool(x), drawn(0, SHAPE)) for _ in range(4))
        pool.refit({"w": w})
        assert all(np.array_equal(pool(x), w) for _ in range(4))


@on_host
@pytest.mark.parametrize("short", [0, 1])
def test_where_one_device_has_too_little_memory_for_a_refit_none_changes(host: HostDriver, short: int) -> None:
    x, w = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(weighted()) as pool:
        allocate = host.cuMemAlloc

        def allocated(nbytes: int) -> Any:
            if pool.devices[short] == host.current_device:
                return (host.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            return allocate(nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "cuMemAlloc", allocated)
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                pool.refit({"w": w})
        assert all(np.array_equal(pool(x), drawn(0, SHAPE)) for _ in pool.devices)
        pool.refit({"w": w})
        assert all(np.array_equal(pool(x), w) for _ in pool.devices)


@on_host
def test_an_interrupt_within_a_refit_comes_once_all_devices_are_changed(host: HostDriver) -> None:
    x, w = drawn(1, SHAPE), drawn(2, SHAPE)
    synchronize = host.cuCtxSynchronize
    count = 0

    def interrupting() -> Any:
        nonlocal count
        count += 1
        if count == 3:  # after one for each device, before the change
            os.kill(os.getpid(), signal.SIGINT)
        return synchronize()

    with load_pool(weighted()) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "cuCtxSynchronize", interrupting)
            with pytest.raises(KeyboardInterrupt):
                pool.refit({"w": w})
        assert all(np.array_equal(pool(x), w) for _ in pool.devices)


@on_host
@pytest.mark.parametrize("first", [0, 1])
def test_a_context_within_the_call_of_one_on_another_device_that_a_refit_waits_for(
    host: HostDriver, first: int
) -> None:
    del host
    x, w = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(weighted()) as pool, ThreadPoolExecutor(1) as threads:
        contexts = [pool.context(), pool.context()]
        outer, inner = contexts[first], contexts[1 - first]
        with outer._turn.owner, outer._turn.lock:  # as within its call
            refit = threads.submit(pool.refit, {"w": w})
            until(lambda: outer._turn.waits)
            if inner._turn.lock.locked():
                with pytest.raises(InputError, match="is at work in this thread, which a signal handler"):
                    inner(x)
            else:
                assert np.array_equal(inner(x), drawn(0, SHAPE))
        refit.result(20)
        assert all(np.array_equal(context(x), w) for context in contexts)


def test_an_empty_input_serves_any_device(put: Callable[[np.ndarray], Any]) -> None:
    del put
    with load_pool(copying(SHAPE, (0, 1))) as pool:
        x = pool.empty_input("x")
        x[...] = drawn(1, SHAPE)
        for _ in range(2 * len(pool.devices)):
            assert np.array_equal(pool(x), drawn(1, SHAPE))
    with pytest.raises(InputError, match="closed"):
        pool.empty_input("x")


def test_a_conversation_is_a_context_on_one_device(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, other = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(counting()) as pool:
        with pytest.raises(InputError, match=r"the plan has state, .*: call a context of yours, pool.context\(\)"):
            pool(x)
        contexts = [pool.context() for _ in range(4)]
        for context in contexts:
            assert not context(x).any()
        assert np.array_equal(contexts[0](other), x)
        pool.reset()
        assert not any(context(x).any() for context in contexts)


def called(pool: ExecutablePool, x: np.ndarray) -> list[Context]:
    """Contexts of which each has been called once."""
    contexts = [pool.context() for _ in range(4)]
    for context in contexts:
        context(x)
    return contexts


def test_a_reset_waits_for_a_run_of_a_context(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, other = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(counting()) as pool, ThreadPoolExecutor(1) as threads:
        contexts = called(pool, x)
        busy = contexts[1]
        with busy._turn.owner, busy._turn.lock:  # as within its call
            reset = threads.submit(pool.reset)
            until(lambda: busy._turn.waits or reset.done())
        reset.result(20)
        assert not any(context(other).any() for context in contexts)


def test_a_reset_that_one_context_refuses_resets_none(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, other = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(counting()) as pool:
        contexts = called(pool, x)
        for busy in contexts:
            steps = busy.steps({"x": x})
            next(steps)
            with pytest.raises(InputError, match=r"a run by steps\(\) is half done"):
                pool.reset()
            steps.close()
        assert all(np.array_equal(context(other), x) for context in contexts)


def test_a_reset_that_is_interrupted_while_it_waits_resets_none(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x, other = drawn(1, SHAPE), drawn(2, SHAPE)
    with load_pool(counting()) as pool:
        contexts = called(pool, x)
        for busy in contexts:
            with interrupting(busy), pytest.raises(KeyboardInterrupt):
                pool.reset()
        assert all(np.array_equal(context(other), x) for context in contexts)


def test_scratch_memory_of_kernels_is_no_state(put: Callable[[np.ndarray], Any]) -> None:
    del put
    assert keeps_state(counting())
    assert not keeps_state(with_scratch())
    with load_pool(with_scratch(), devices=[0]) as pool:
        for seed in range(3):
            assert np.array_equal(pool.run({"x": drawn(seed, SHAPE)})["y"], drawn(seed, SHAPE))
    with nimblert.load(with_scratch()) as executable:
        assert not executable.state


@on_host
def test_contexts_are_spread(host: HostDriver) -> None:
    del host
    with load_pool(counting()) as pool:
        contexts = [pool.context() for _ in range(4)]
        assert sum(len(member.contexts) == 2 for member in pool._members) == len(contexts) // 2


def test_what_is_closed_says_so(put: Callable[[np.ndarray], Any]) -> None:
    del put
    pool = load_pool(copying(SHAPE, (0, 1)))
    pool.close()
    pool.close()
    for use in (lambda: pool(drawn(1, SHAPE)), pool.context, pool.reset):
        with pytest.raises(InputError, match="this pool is closed: load the plan again"):
            use()


def test_closing_waits_for_calls(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x = drawn(1, SHAPE)
    pool = load_pool(copying(SHAPE, (0, 1)))
    with ThreadPoolExecutor(2) as threads:
        with held() as began:
            call = threads.submit(pool.run, {"x": x})
            until(lambda: bool(began()))
            closing = threads.submit(pool.close)
            assert not closing.done()
        assert np.array_equal(call.result()["y"], x)
        closing.result()


def test_a_refit_that_is_interrupted_while_it_waits_ends_nothing(put: Callable[[np.ndarray], Any]) -> None:
    del put
    x = drawn(1, SHAPE)
    with load_pool(weighted()) as pool, ThreadPoolExecutor(2) as threads:

        def interrupt() -> None:
            until(pool._exclusive.locked)
            os.kill(os.getpid(), signal.SIGINT)

        with held() as began:
            call = threads.submit(pool.run, {"x": x})
            until(lambda: bool(began()))
            interrupting = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.refit({"w": x})
        for calling in (call, threads.submit(pool.run, {"x": x})):
            assert np.array_equal(calling.result(20)["y"], drawn(0, SHAPE))
        interrupting.result()


@on_host
def test_devices_are_those_named_or_all_that_can_run_the_plan(host: HostDriver) -> None:
    del host
    plan = copying(SHAPE, (0, 1))
    with load_pool(plan, devices=[1]) as pool:
        assert pool.devices == (1,)
        assert repr(pool).endswith("devices=[1])")
    for devices in ([], [0, 0]):
        with pytest.raises(InputError, match=r"devices: got .*, expected ordinals of GPUs, each once"):
            load_pool(plan, devices=devices)
    with pytest.raises(DeviceMismatchError, match="device 2: CUDA shows 2 here"):
        load_pool(plan, devices=[0, 2])
    other = replace(plan, device=replace(plan.device, compute_capability=(8, 0)))
    with pytest.raises(DeviceMismatchError, match=r"compute capability 8\.0"):
        load_pool(other)


def test_a_plan_for_the_cpu_is_loaded_once() -> None:
    with load_pool(cpu_plan()) as pool:
        assert pool.devices == (0,)
