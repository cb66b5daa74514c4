"""What goes wrong around a loaded plan while it serves: nothing hangs, and no answer is wrong."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_plans import floats, plan_file, write_model
from onnx import helper
from subprocesses import ROOT, python

import nimblert
from nimblec.plan import encoder
from nimblert import Arena, CudaError, InputError, Limits, golden
from nimblert.check.verify import read_plan
from nimblert.context import Context
from nimblert.cuda import driver
from nimblert.plan import Plan

WIDTH = 128
BLOCK = ROOT / "tests" / "data" / "triton_block.plan"
node = helper.make_node


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tanh(x @ w) @ w as a plan of two streams of the CPU."""
    folder = tmp_path_factory.mktemp("faults")
    weight = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 11
    model = write_model(
        folder / "model.onnx",
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Tanh", ["a"], ["b"]),
            node("MatMul", ["b", "w"], ["y"]),
            node("Sigmoid", ["x"], ["z"]),
        ],
        [floats("x", 4, WIDTH)],
        [floats("y", 4, WIDTH), floats("z", 4, WIDTH)],
        constants={"w": weight},
    )
    encoder.write(plan_file(model, streams=None), folder / "model.plan")
    return folder / "model.plan"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def path(request: pytest.FixtureRequest, small: Path) -> Path:
    """Return a plan for each target."""
    return small if request.param == "cpu" else BLOCK


def result(context: Context, seed: int = 0) -> bytes:
    """Return the outputs for drawn inputs."""
    outputs = context.run(golden.draw_inputs(context.program, seed))
    return b"".join(array.tobytes() for array in outputs.values())


def doubled(plan: Plan) -> Plan:
    """Return the plan with other weights."""
    weights = tuple(replace(w, data=memoryview(2 * np.asarray(w.data).view(np.float32))) for w in plan.weights)
    return replace(plan, weights=weights)


def test_replaced_plan_serves_on(path: Path, tmp_path: Path) -> None:
    served = tmp_path / "served.plan"
    first = read_plan(path, copy=True)
    second = doubled(first)
    first.save(served)
    with nimblert.load(served) as model, ThreadPoolExecutor(1) as pool:
        expected = result(model)
        ended = threading.Event()

        def serve() -> set[bytes]:
            found = set()
            while not ended.is_set():
                found.add(result(model))
            return found

        serving = pool.submit(serve)
        others = set()
        for plan in (second, first) * 5:
            encoder.write(plan, served)
            with nimblert.load(served) as other:
                others.add((plan is first, result(other)))
        served.unlink()
        found = result(model)
        ended.set()
        assert serving.result(30) == {expected} == {found}
    assert len(others) == 2
    assert (True, expected) in others
    assert (False, expected) not in others


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.02])
def test_close_ends_running_threads(path: Path, delay: float) -> None:
    model = nimblert.load(path)
    expected = result(model)
    contexts = [model.context() for _ in range(3)]
    started = threading.Barrier(5, timeout=30)

    def serve(context: Context) -> str:
        started.wait()
        while True:
            try:
                assert result(context) == expected
            except InputError as exc:
                return str(exc)

    with ThreadPoolExecutor(4) as pool:
        serving = [pool.submit(serve, context) for context in (model, *contexts)]
        started.wait()
        time.sleep(delay)
        model.close()
        said = {thread.result(30) for thread in serving}
    assert said == {"this context is closed: make another one", "this executable is closed: load the plan again"}


LEFT = """
import asyncio, os, sys, threading, time, nimblert
from nimblert import golden
os.sched_getaffinity = lambda _: set(range(8))  # sessions with threads of their own
model = nimblert.load(sys.argv[1])
x = golden.draw_inputs(model.program, 0)
expected = [array.tobytes() for array in model.run(x).values()]

def serve(context):
    try:
        while True:
            if [array.tobytes() for array in context.run(x).values()] != expected:
                os._exit(7)
    except nimblert.InputError:  # closed as the interpreter ends
        pass

for context in (model, *(model.context() for _ in range(3))):
    threading.Thread(target=serve, args=(context,), daemon=True).start()
half_done = model.context().steps(x)
next(half_done)
time.sleep(0.2)
print("end")
"""


def test_process_ends_with_live_contexts(path: Path) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEFT, path],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# --- on a GPU


@pytest.mark.gpu
def test_missing_device_memory_is_an_error() -> None:
    plan = read_plan(BLOCK)
    huge = replace(plan, programs=(replace(plan.programs[0], arena_nbytes=1 << 46),))
    with nimblert.load(plan) as model:
        expected = result(model)
        for _ in range(3):
            with pytest.raises(CudaError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
                nimblert.load(huge, limits=Limits(memory_nbytes=1 << 50))
            with pytest.raises(CudaError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
                Arena(1 << 46)
            assert result(model) == result(model.context()) == expected
    with nimblert.load(plan) as again:
        assert result(again) == expected


STICKY = """
import sys, nimblert
from nimblert import golden

class Nowhere:
    def address(self, pointer):
        return 1 << 60

model = nimblert.load(sys.argv[1])
context = model.context()
x = golden.draw_inputs(model.program, 0)
context.run(x)

def fail():
    backend = context._backends[context.program.name]
    backend.memory = Nowhere()
    backend.profile()

def said(action):
    try:
        action()
    except nimblert.CudaError as exc:
        return exc.result
    return "nothing"

load = lambda: nimblert.load(sys.argv[1])
uses = [fail, lambda: model.run(x), lambda: context.run(x), model.replay, model.context, load]
print(*{said(use) for use in uses})
context.close()
model.close()
try:
    model.run(x)
except nimblert.InputError as exc:
    print(exc)
"""


@pytest.mark.gpu
def test_kernel_failure_ends_own_contexts() -> None:
    with nimblert.load(BLOCK) as model:
        expected = result(model)
        errors, closed = python(STICKY, BLOCK, timeout=60).splitlines()
        assert errors == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert closed == "this executable is closed: load the plan again"
        assert result(model) == expected


STICKY_POOL = """
import sys, nimblert
from nimblert import golden
from nimblert.executable import Executable

class Nowhere:
    def address(self, pointer):
        return 1 << 60

run = Executable.run

def failing(self, *args, **kwargs):
    if self.device == 0:
        backend = self._backends[self.program.name]
        backend.memory = Nowhere()
        backend.profile()
    return run(self, *args, **kwargs)

pool = nimblert.load_pool(sys.argv[1], devices=[0, 1])
x = golden.draw_inputs(pool.plan.programs[0], 0)
Executable.run = failing
for use in (*[pool.run] * 4, *[executable.run for executable in pool.executables]):
    try:
        use(x)
        print("nothing")
    except nimblert.CudaError as exc:
        print(exc)
pool.close()
"""


@pytest.mark.gpu
def test_pool_raises_error_of_failed_gpu() -> None:
    """CUDA then refuses every call of the process, on any of its GPUs; closing works."""
    driver.initialise()
    if driver.count() < 2:
        pytest.skip("needs two GPUs")
    said = python(STICKY_POOL, BLOCK, timeout=60).splitlines()
    assert len(said) == 6
    ends = "CUDA_ERROR_ILLEGAL_ADDRESS; this process can no longer use CUDA: load the plan in a new one"
    assert all(line.endswith(ends) for line in said)


FORKED = """
import os, sys, nimblert
from nimblert import golden
model = nimblert.load(sys.argv[1])
x = golden.draw_inputs(model.program, 0)
expected = [array.tobytes() for array in model.run(x).values()]
child = os.fork()
if child == 0:
    for use in (lambda: model.run(x), lambda: nimblert.load(sys.argv[1])):
        try:
            use()
        except nimblert.NimbleError as exc:
            print(type(exc).__name__, "fork" in str(exc))
    model.close()
    sys.exit(0)
print("child", os.waitpid(child, 0)[1])
assert [array.tobytes() for array in model.run(x).values()] == expected
"""


@pytest.mark.gpu
def test_a_forked_process_cannot_use_the_gpu_and_says_so() -> None:
    assert python(FORKED, BLOCK, timeout=60).splitlines() == ["InputError False", "DeviceMismatchError True", "child 0"]


def test_a_plan_on_the_cpu_that_asks_for_more_than_there_is(small: Path) -> None:
    plan = read_plan(small)
    huge = replace(plan, programs=(replace(plan.programs[0], arena_nbytes=1 << 46),))
    with nimblert.load(small) as model:
        expected = result(model)
        with pytest.raises(nimblert.DeviceMismatchError, match="bytes of memory in one piece, more than is here"):
            nimblert.load(huge, limits=Limits(memory_nbytes=1 << 50))
        assert result(model) == expected


SHORT_OF_MEMORY = """
import resource, sys, numpy as np, nimblert
with nimblert.load(sys.argv[1]) as model:
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 28), resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            model(np.ones(1, np.float32))
        except nimblert.InputError as exc:
            print(exc)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(model(np.ones(1, np.float32)))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="bounds memory as Linux does")
def test_cpu_run_without_memory_says_so(tmp_path: Path) -> None:
    nodes = [helper.make_node("Expand", ["x", "n"], ["a"]), helper.make_node("ReduceMax", ["a"], ["y"], keepdims=0)]
    constants = {"n": np.array([1 << 28])}
    write_model(tmp_path / "m.onnx", nodes, [floats("x", 1)], [floats("y")], constants=constants)
    encoder.write(plan_file(tmp_path / "m.onnx"), tmp_path / "m.plan")
    first, second, result = python(SHORT_OF_MEMORY, tmp_path / "m.plan").splitlines()
    assert first == second
    assert first.startswith("op Expand (a): needs more memory than there is: ")
    assert float(result) == 1
