"""Streams of a CPU program: what a Ctrl-C, a failure or a missing thread leaves behind."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import bent_sum, floats, plan_file, write_model
from onnx import TensorProto, helper
from subprocesses import python

import nimblert
from nimblec.plan import encoder
from nimblert.cpu.backend import CpuBackend
from nimblert.cpu.streams import Bound, Step, Streams, Worker, interruptible, pass_gate, unlock
from nimblert.errors import DeviceMismatchError, InputError
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
    made = Streams(bound, gates, Options(), (ValueError,), lambda command, _: type(command).__name__)
    made.start()
    return made


def interrupt() -> None:
    """As Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def branches(folder: Path, count: int) -> Plan:
    """The sum of ``count`` products, each on a stream of its own."""
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


def test_an_interrupt_stops_every_stream_at_its_next_command() -> None:
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


class _StopError(Exception):
    """What a signal handler raises."""


SIGNALS = (signal.SIGALRM, signal.SIGUSR1)


@pytest.fixture
def left() -> Iterator[list[int]]:
    """The handlers of two signals raise as often as this list has numbers."""
    numbers: list[int] = []

    def stop(*_: object) -> None:
        if numbers:
            raise _StopError(numbers.pop())

    before = [signal.signal(number, stop) for number in SIGNALS]
    yield numbers
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def one_after_the_other() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)


def at_once() -> None:
    for number in SIGNALS:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def until(holds: Callable[[], bool]) -> None:
    end_at = time.monotonic() + 5
    while not holds() and time.monotonic() < end_at:
        time.sleep(0.002)


@pytest.mark.parametrize("come", [one_after_the_other, at_once])
def test_exceptions_of_several_signals_leave_no_stream_at_work(left: list[int], come: Step) -> None:
    done: list[int] = []

    def slow() -> None:
        come()
        until(lambda: not left)
        time.sleep(0.1)
        done.append(1)

    ready = streams([], steps(1, slow))
    left.extend([1, 2])
    with pytest.raises(_StopError):
        ready.run()
    assert done
    ready.close()


@pytest.mark.parametrize("come", [one_after_the_other, at_once])
def test_exceptions_of_several_signals_while_streams_are_closed_leave_no_thread(left: list[int], come: Step) -> None:
    began = threading.Event()

    def slow() -> None:
        began.set()
        until(lambda: ready._halted)
        come()
        until(lambda: not left)
        time.sleep(0.1)

    ready = streams([], steps(1, slow))
    (worker,) = ready._workers
    worker.start()
    assert began.wait(20)
    left.extend([1, 2])
    with pytest.raises(_StopError):
        ready.close()
    assert not worker._thread.is_alive()


@pytest.mark.parametrize(("come", "times"), [(one_after_the_other, 1), (at_once, 100)])
def test_exceptions_of_several_signals_leave_no_step_at_work(left: list[int], come: Step, times: int) -> None:
    """One that ends once it is told to. Now and then a signal comes just before the caller sleeps."""
    for _ in range(times):
        options = Options()

        def endless(options: Options = options) -> None:
            come()
            until(lambda: options.terminate and not left)

        before = threading.active_count()
        left.extend([1, 2])
        with pytest.raises(_StopError):
            interruptible(endless, options)
        assert options.terminate
        assert threading.active_count() == before


@pytest.mark.parametrize("method", ["settle", "end", "join"])
def test_an_interrupt_while_a_step_that_can_be_interrupted_ends_is_raised(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    real = getattr(Worker, method)
    interrupts = [KeyboardInterrupt]

    def interrupted(worker: Worker) -> None:
        if interrupts:
            raise interrupts.pop()
        real(worker)

    monkeypatch.setattr(Worker, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: None, Options())
    assert threading.active_count() == before


def test_a_run_after_an_interrupt_is_whole() -> None:
    done: list[int] = []
    pauses = [0.5]

    def step() -> None:
        done.append(1)
        if pauses[0] and len(done) == 20:
            interrupt()

    ready = streams(steps(30, lambda: time.sleep(pauses[0])), steps(30, step))
    with pytest.raises(KeyboardInterrupt):
        ready.run()
    done.clear()
    pauses[0] = 0
    ready.run()
    assert len(done) == 30
    ready.close()


def test_an_interrupt_frees_streams_that_wait_for_one_another() -> None:
    gate, never = threading.Lock(), threading.Lock()
    waiting = [(Wait(stream=1, event=1), partial(pass_gate, never)), (Record(stream=1, event=0), partial(unlock, gate))]
    first = [(Wait(stream=0, event=0), partial(pass_gate, gate))]
    third = [*steps(1, partial(time.sleep, 0.05)), *steps(1, interrupt)]
    ready = streams(first, waiting, third, gates=[gate, never])
    with pytest.raises(KeyboardInterrupt):
        ready.run()
    ready.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_stops_the_other_streams(failing: int) -> None:
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


def test_what_a_thread_cannot_handle_is_raised_in_the_callers() -> None:
    def full() -> None:
        raise MemoryError("none left")

    ready = streams(steps(1, lambda: None), steps(1, full))
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            ready.run()
    ready.close()


def test_a_stream_without_a_thread_is_a_sentence_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = branches(tmp_path, 3)
    before = threading.active_count()
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", second_fails)
        with pytest.raises(DeviceMismatchError, match=r"3 streams, .*can't start new thread.*--streams 1"):
            CpuBackend(plan, plan.programs[0])
    started[0].join(timeout=30)
    assert threading.active_count() == before


def test_a_step_runs_where_no_thread_is_left_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with nimblert.load(bent_sum(tmp_path)) as model, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        x = np.ones(4, np.float32)
        without = model(x)
        patch.undo()
        assert np.array_equal(without, model(x))


def test_a_backend_that_is_dropped_ends_its_threads(tmp_path: Path) -> None:
    plan = branches(tmp_path, 3)
    before = set(threading.enumerate())
    backend = CpuBackend(plan, plan.programs[0])
    backend.run()
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del backend
    for thread in own:
        thread.join(timeout=30)
        assert not thread.is_alive()


HAMMER = """
import random, signal, sys, numpy as np, nimblert
left = 0

def interrupt(*_):
    global left
    if left:
        left -= 1
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
model = nimblert.load(sys.argv[1])
(tensor,) = model.inputs
rng = np.random.default_rng(0)
inputs = [rng.standard_normal(tensor.shape).astype(np.float32) for _ in range(4)]
expected = [model(x) for x in inputs]
random.seed(0)
interrupted = 0
for i in range(400):
    x = inputs[i % 4]
    left = random.choice([1, 2])
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4), 5e-5)
            while left:
                model(x)
        except KeyboardInterrupt:
            interrupted += 1
            while left:
                model(x)
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    j = (i + 1) % 4
    assert np.array_equal(model(inputs[j]), expected[j]), i
print(interrupted)
"""


@pytest.mark.skipif(sys.version_info[:2] == (3, 14), reason="with can skip __exit__: python/cpython#148874")
def test_interrupts_at_any_moment_leave_a_model_that_computes_the_same(tmp_path: Path) -> None:
    encoder.write(branches(tmp_path, 3), tmp_path / "model.plan")
    assert int(python(HAMMER, tmp_path / "model.plan")) == 400


ENDLESS = """
import signal, sys, numpy as np, nimblert

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
with nimblert.load(sys.argv[1]) as model:
    x = np.ones((2, 3), np.float32)
    for run in (lambda: model(np.float32(101), x), lambda: list(model.steps({"g": np.float32(101), "x": x}))):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            run()
            print("ended")
        except KeyboardInterrupt:
            print("interrupted")
        print(model(np.float32(0), x).sum())
"""


def test_a_loop_without_end_can_be_interrupted(tmp_path: Path) -> None:
    scalar = partial(helper.make_tensor_value_info, elem_type=TensorProto.BOOL, shape=())
    body = helper.make_graph(
        [node("Identity", ["keep"], ["next"]), node("Add", ["s", "s"], ["doubled"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, ()),
            scalar("keep"),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, (2, 3)),
        ],
        [scalar("next"), helper.make_tensor_value_info("doubled", TensorProto.FLOAT, (2, 3))],
    )
    path = write_model(
        tmp_path / "model.onnx",
        [node("Greater", ["g", "hundred"], ["go"]), node("Loop", ["", "go", "x"], ["y"], body=body)],
        [floats("g"), floats("x", 2, 3)],
        [floats("y", 2, 3)],
        constants={"hundred": np.float32(100)},
    )
    encoder.write(plan_file(path), tmp_path / "model.plan")
    assert python(ENDLESS, tmp_path / "model.plan", timeout=60).split() == ["interrupted", "6.0"] * 2
