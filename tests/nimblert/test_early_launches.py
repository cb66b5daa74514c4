"""Calls from the host whose graph is launched before their inputs are in page-locked memory."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf

import numpy as np
import pytest

pytest.importorskip("torch")  # for the fixtures
from copying import ORDERS, by_kernel, copying, copying_each, drawn, laid_out, on_host
from host_driver import HostDriver
from plans import weight

import nimblert
from nimblert import Executable
from nimblert.cuda import driver, early
from nimblert.cuda.backend import CudaBackend
from nimblert.cuda.early import StagedArrays
from nimblert.plan import Memset, Plan, Pointer, Region

pytest_plugins = ("gpu_memory",)
pytestmark = pytest.mark.usefixtures("patient")

SHAPE = (4, 3, 128, 96)
"""Of several parts in float32, the last of which is shorter."""


def staged(model: Executable) -> list[StagedArrays]:
    """Where the graphs of calls find their inputs."""
    backend = model.backend
    assert isinstance(backend, CudaBackend)
    return [made.staged for graphs in (backend._calls._arriving, backend._calls._whole) for made in graphs.values()]


def is_early(model: Executable) -> bool:
    """Whether calls are launched early, but for those that follow a late one."""
    found = staged(model)
    assert found
    return all(each.rest < inf for each in found)


def check(model: Executable, inputs: Callable[[int], np.ndarray], count: int = 12) -> None:
    for seed in range(count):
        x = inputs(seed)
        assert np.array_equal(model(x), x)


@pytest.mark.parametrize("given", ORDERS)
@pytest.mark.parametrize("own", ORDERS)
def test_every_call_has_its_own_input_in_any_order_of_axes(put: object, own: str, given: str) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS[own]), poison=True) as model:
        check(model, lambda seed: laid_out(drawn(seed, SHAPE), ORDERS[given]))
        assert is_early(model)


@pytest.mark.parametrize(
    ("nbytes", "dtype"),
    [
        (early.PART_NBYTES, "uint8"),
        (early.PART_NBYTES + 1, "uint8"),
        (2 * early.PART_NBYTES - 1, "bool"),
        (2 * early.PART_NBYTES + 16, "float16"),
        (3 * early.PART_NBYTES + 24, "float64"),
        (3 * early.PART_NBYTES + 3, "int8"),
        ((1 << 20) + 8, "float64"),
        (1 << 21, "float32"),
    ],
)
def test_every_byte_arrives(put: object, nbytes: int, dtype: str) -> None:
    del put
    shape = (nbytes // np.dtype(dtype).itemsize,)
    with nimblert.load(by_kernel(copying(shape, (0,), dtype)), poison=True) as model:
        check(model, lambda seed: np.random.default_rng(seed).integers(0, 200, shape).astype(dtype), 40)
        assert is_early(model)


def test_an_input_with_gaps_arrives_whole(put: object) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: drawn(seed, (*SHAPE[:3], 2 * SHAPE[3]))[..., ::2])
        check(model, lambda seed: np.broadcast_to(drawn(seed, SHAPE[-1:]), SHAPE))
        check(model, lambda seed: drawn(seed, SHAPE)[::-1])
        assert is_early(model)


def test_several_inputs(put: object) -> None:
    del put
    shapes = [(5,), (300, 200), (1, 7), (123, 457)]
    with nimblert.load(copying_each(shapes), poison=True) as model:
        for seed in range(12):
            xs = [drawn(seed + index, shape) for index, shape in enumerate(shapes)]
            found = model(*xs)
            assert all(np.array_equal(y, x) for x, y in zip(xs, found, strict=True))
        assert is_early(model)


def test_small_inputs_are_there_before(put: object) -> None:
    del put
    with nimblert.load(copying((1 << 10,), (0,))) as model:
        check(model, lambda seed: drawn(seed, (1 << 10,)))
        assert [each.rest for each in staged(model)] == [inf]


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the host fill memory only after a while."""
    fill = StagedArrays.fill

    def filling(self: StagedArrays, arrays: Sequence[np.ndarray]) -> None:
        time.sleep(seconds)
        fill(self, arrays)

    monkeypatch.setattr(StagedArrays, "fill", filling)


@pytest.mark.parametrize("shape", [SHAPE, (early.PART_NBYTES // 4 + 1,)])
def test_a_call_that_comes_late_runs_again(
    put: object, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    del put
    with nimblert.load(copying(shape, range(len(shape))), poison=True) as model:
        check(model, lambda seed: drawn(seed, shape), 40)  # outputs in memory that comes again have a graph by now
        for each in staged(model):
            each.rest, each._next_rest = 0, early._REST
        with monkeypatch.context() as patch:
            slow(patch, 0.02)
            if isinstance(found := driver.bindings(), HostDriver):
                patch.setattr(found, "patience_s", 0.001)
            check(model, lambda seed: drawn(100 + seed, shape), 3)
        assert sorted(each.rest for each in staged(model)) in ([early._REST - 2], [0, early._REST - 2])
        check(model, lambda seed: drawn(200 + seed, shape), early._REST - 2)
        assert {each.rest for each in staged(model)} == {0}
        check(model, lambda seed: drawn(500 + seed, shape))


@on_host
def test_calls_that_would_come_late_are_tried_ever_more_rarely(put: object, host: HostDriver) -> None:
    del put
    host.patience_s = 0.0
    shape = (early.PART_NBYTES // 4,)
    tried = []
    with nimblert.load(by_kernel(copying(shape, (0,))), poison=True) as model:
        check(model, lambda seed: drawn(seed, shape))  # for the graph of whole calls
        host.late = 0
        (found,) = model.backend._calls._whole.values()  # type: ignore[attr-defined]
        found.staged.rest = 0
        for number in range(1 + 7 * early._REST):
            late = host.late
            check(model, lambda seed: drawn(seed, shape), 1)
            if host.late > late:
                tried.append(number)
    waits = np.diff([0, *tried])
    assert list(waits) == [0, 2 * early._REST + 1, 4 * early._REST + 1]


def test_an_interrupted_call_ends_and_the_next_is_right(put: object, monkeypatch: pytest.MonkeyPatch) -> None:
    del put
    if isinstance(found := driver.bindings(), HostDriver):
        found.patience_s = 0.1

    def interrupted(self: StagedArrays, _: object) -> None:
        self.words[0] = 1
        raise KeyboardInterrupt

    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: drawn(seed, SHAPE), 40)
        for seed in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(StagedArrays, "fill", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    model(drawn(seed, SHAPE))
            check(model, lambda seed: drawn(50 + seed, SHAPE), 3)
        assert is_early(model)


@on_host
@pytest.mark.parametrize("region", [Region.STATE, Region.INPUT])
def test_a_program_that_may_not_run_twice_is_not_launched_early(put: object, region: Region) -> None:
    del put
    with nimblert.load(writing(region, name="kept")) as model:
        for seed in range(6):
            model(drawn(seed, SHAPE))
        assert {each.rest for each in staged(model)} == {inf}


@on_host
def test_the_first_launch_of_a_graph_is_not_early(
    put: object, host: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    del put
    order = []
    fill, launch = StagedArrays.fill, host.cuGraphLaunch
    monkeypatch.setattr(host, "cuGraphLaunch", lambda *given: order.append("launch") or launch(*given))
    monkeypatch.setattr(StagedArrays, "fill", lambda *given: order.append("copy") or fill(*given))
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"])) as model:
        x = drawn(0, SHAPE)
        for _ in range(6):
            order.clear()
            model(x)
            if "copy" in order:
                break
        assert order == ["copy", "launch"]
        model(x)
        assert order == ["copy", "launch", "launch", "copy"]


def test_a_program_with_scratch_memory_of_kernels_is_launched_early(put: object) -> None:
    del put
    with nimblert.load(writing(Region.STATE, name="")) as model:
        check(model, lambda seed: drawn(seed, SHAPE))
        assert is_early(model)


def writing(region: Region, *, name: str) -> Plan:
    """A plan that also writes the first bytes of a region, with a state of that name."""
    plan = copying(SHAPE, ORDERS["contiguous"])
    (program,) = plan.programs
    fill = Memset(dst=Pointer(region=region), value=1, element_nbytes=1, count=16, stream=0, op=0)
    program = replace(program, commands=(*program.commands, fill))
    return replace(plan, state_nbytes=16, state=(weight(name, (1.0, 2.0, 3.0, 4.0), 0),), programs=(program,))


@on_host
@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "uint16", "uint32", "uint64"])
def test_what_may_be_an_index_is_not_mixed_from_two_calls(put: object, dtype: str) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"], dtype), poison=True) as model:
        check(model, lambda seed: drawn(seed, SHAPE, dtype))
        assert {each.rest for each in staged(model)} == {inf}


@on_host
def test_where_stores_are_not_seen_in_order_nothing_is_launched_early(
    put: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del put
    monkeypatch.setattr(early, "_IN_ORDER", False)
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model:
        check(model, lambda seed: drawn(seed, SHAPE))
        assert {each.rest for each in staged(model)} == {inf}


def test_the_calls_of_many_threads_are_right(put: object) -> None:
    del put
    with nimblert.load(copying(SHAPE, ORDERS["contiguous"]), poison=True) as model, ThreadPoolExecutor(8) as threads:

        def calls(seed: int) -> None:
            with model.context() as context:
                for _ in range(30):
                    x = drawn(seed, SHAPE)
                    assert np.array_equal(context(x), x)

        for done in [threads.submit(calls, seed) for seed in range(8)]:
            done.result()
