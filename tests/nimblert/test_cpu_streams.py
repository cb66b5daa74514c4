"""Streams of a CPU program: what a Ctrl-C, a failure or a missing thread leaves behind."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import backend_of, floats, plan_file, write_model
from onnx import TensorProto, helper, numpy_helper

import nimblec
from nimblert.cpu.host_memory import HostWeights
from nimblert.cpu.onnx_session import SessionCache
from nimblert.cpu.streams import Bound, Step, Streams, Waiting, open_gate, pass_gate, pools
from nimblert.errors import InputError
from nimblert.plan import Command, Memset, Plan, Pointer, Record, Region, Wait

WIDTH = 64
node = helper.make_node


class Options:
    """RunOptions of nothing."""

    terminate = False


def work(stream: int = 0) -> Command:
    return Memset(stream=stream, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=1, count=0)


def steps(count: int, step: Step) -> list[Bound]:
    return [(work(), step)] * count


def streams(*bound: Sequence[Bound], gates: Sequence[threading.Lock] = ()) -> Streams:
    return Streams(bound, gates, Options(), (ValueError,), lambda command, _: type(command).__name__)


def interrupt() -> None:
    """Interrupt as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def branches(folder: Path, count: int) -> Plan:
    """Return the sum of ``count`` products, each on a stream of its own."""
    names = [f"p{i}" for i in range(count)]
    rng = np.random.default_rng(0)
    path = write_model(
        folder / "model.onnx",
        [*(node("MatMul", ["x", f"w{i}"], [name]) for i, name in enumerate(names)), node("Sum", names, ["y"])],
        [floats("x", 4, WIDTH)],
        [floats("y", 4, WIDTH)],
        constants={f"w{i}": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for i in range(count)},
    )
    plan = plan_file(path, streams=None)
    assert plan.programs[0].stream_count == count
    return plan


def test_interrupt_stops_every_stream_at_its_next_command() -> None:
    done: list[str] = []
    counter = itertools.count()

    def slow(name: str) -> None:
        time.sleep(0.02)
        done.append(name)
        if next(counter) == 10:
            interrupt()

    ready = streams(*(steps(2000, partial(slow, name)) for name in "abc"))  # forty seconds
    with pytest.raises(KeyboardInterrupt):
        ready.run()
    stopped = len(done)
    time.sleep(0.1)
    assert 0 < stopped == len(done) < 3000
    ready.close()


def test_interrupt_frees_streams_that_wait_for_one_another() -> None:
    gate, never = threading.Lock(), threading.Lock()
    waiting = [
        (Wait(stream=1, event=1), partial(pass_gate, never)),
        (Record(stream=1, event=0), partial(open_gate, gate)),
    ]
    first = [(Wait(stream=0, event=0), partial(pass_gate, gate))]
    third = [*steps(1, partial(time.sleep, 0.05)), *steps(1, interrupt)]
    ready = streams(first, waiting, third, gates=[gate, never])
    with pytest.raises(KeyboardInterrupt):
        ready.run()
    ready.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_op_stops_the_other_streams(failing: int) -> None:
    done: list[int] = []
    before: list[int] = []

    def slow() -> None:
        time.sleep(0.005)
        done.append(1)

    def fail() -> None:
        before.append(len(done))
        raise ValueError("no such index")

    bound = [steps(4000, slow), steps(4000, slow)]  # twenty seconds
    bound[failing][3] = (work(), fail)
    ready = streams(*bound)
    with pytest.raises(InputError, match="Memset: failed on these inputs: no such index"):
        ready.run()
    assert len(done) - before[0] < 100
    ready.close()


def test_exception_of_a_streams_thread_is_raised_by_the_call() -> None:
    def full() -> None:
        raise MemoryError("none left")

    ready = streams(steps(1, lambda: None), steps(1, full))
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            ready.run()
    ready.close()


def test_threads_end_with_a_backend_that_is_dropped(tmp_path: Path) -> None:
    plan = branches(tmp_path, 3)
    before = set(threading.enumerate())
    backend = backend_of(plan)
    backend.run()
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del backend
    for thread in own:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("touched", "expected"),
    [
        ((128,), [Waiting.SPINNING]),
        ((127,), [None]),
        ((128, 511), [None, None]),
        ((128, 512), [None, Waiting.SPINNING]),
        ((512, 512), [Waiting.SPINNING_IN_RUNS, Waiting.SPINNING_IN_RUNS]),
    ],
)
def test_pools_spin_on_for_one_session_alone(touched: tuple[int, ...], expected: list[Waiting | None]) -> None:
    nbytes = [kib << 10 for kib in touched]
    found = pools(nbytes, 1, (2, ()), nbytes)
    assert [pool.waiting if pool.count == 2 else None for pool in found] == expected


def test_pools_spin_on_where_sizes_share_a_session(tmp_path: Path) -> None:
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=["N", 256])
    weight = numpy_helper.from_array(np.ones((256, 256), np.float32), "w")
    graph = helper.make_graph([node("MatMul", ["x", "w"], ["y"])], "g", [value("x")], [value("y")], [weight])
    opset = [helper.make_opsetid("", 21)]
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=opset).SerializeToString())
    plan = nimblec.compile(path, target="cpu", dims={"N": (4, 8)}, plan_cache=None)
    cache = SessionCache(plan, HostWeights(plan), 2)
    found = {pool.waiting for program in plan.programs for pool in cache.pools(program).values()}
    assert found == {Waiting.SPINNING}
