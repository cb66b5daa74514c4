"""The runtime on a GPU: threads, closing, memory, other machines' plans, processes without a framework."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from concurrency import at_once
from subprocesses import FRAMEWORKS, ROOT, SOURCES, python

import nimblert
from nimblert import Executable, golden
from nimblert.cuda import driver, profiling
from nimblert.cuda.driver import call
from nimblert.plan import Plan, Pointer, Region

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = pytest.mark.gpu

MODEL = "families.resnet:small"
LOADERS, CALLERS, CALLS = 32, 8, 20
LOADS, ROUNDS = 50, 25
SLACK_NBYTES = 16 << 20  # the driver keeps some memory for what comes next

REPLAY = """
import hashlib, sys, nimblert
from nimblert import golden
with nimblert.load(sys.argv[1]) as model:
    (output,) = model.run(golden.draw_inputs(model.program, 1)).values()
loaded = {*sys.argv[2:]} & sys.modules.keys()
assert not loaded, loaded
print(hashlib.sha256(output.tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def plan(gpu_compiler: "GpuCompiler") -> Plan:
    """Return a small ResNet."""
    return gpu_compiler.plan(MODEL)


@pytest.fixture(scope="module")
def path(gpu_compiler: "GpuCompiler", plan: Plan) -> Path:
    """Return the file of it."""
    del plan  # its compilation must have gone well
    return gpu_compiler.path(MODEL)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, 64, 64)).astype(np.float32)


def logits(plan: Plan | Path, x: np.ndarray) -> bytes:
    with nimblert.load(plan) as executable:
        result = executable(x)
    assert isinstance(result, np.ndarray)
    return result.tobytes()


def backend_of(executable: Executable) -> Any:
    return executable._backends[executable.program.name]


def test_threads_that_load_one_file_compute_the_same(path: Path) -> None:
    x = image(0)
    results = at_once(LOADERS, lambda _: logits(path, x))
    assert set(results) == {logits(path, x)}


def test_threads_share_one_executable(plan: Plan) -> None:
    expected = [logits(plan, image(i)) for i in range(CALLERS)]
    assert len(set(expected)) == CALLERS
    with nimblert.load(plan) as executable:

        def run(index: int) -> set[bytes]:
            return {executable.run({"x": image(index)})["output"].tobytes() for _ in range(CALLS)}

        results = at_once(CALLERS, run)
    assert results == [{e} for e in expected]


def test_loading_and_closing_leaves_no_memory_behind(gpu_compiler: "GpuCompiler", path: Path) -> None:
    gpu_compiler.wait()
    x = image(0)
    for _ in range(5):
        logits(path, x)

    def lost() -> int:
        before = call("cuMemGetInfo")[0]
        for _ in range(LOADS):
            logits(path, x)
        return before - call("cuMemGetInfo")[0]

    # What other processes of the GPU take meanwhile is in some rounds, what is not given back in all.
    assert any(lost() <= SLACK_NBYTES for _ in range(ROUNDS))
    assert LOADS * path.stat().st_size > 4 * SLACK_NBYTES  # so that a plan not given back would show


def test_a_replay_takes_the_inputs_that_are_there(plan: Plan) -> None:
    with nimblert.load(plan) as executable:
        first = executable(image(1))
        for _ in range(10):
            executable.replay()
        times = profiling.replay_times(backend_of(executable), 10)
        again = executable(image(1))
    assert isinstance(first, np.ndarray)
    assert isinstance(again, np.ndarray)
    assert first.tobytes() == again.tobytes()
    assert times.shape == (10,)
    assert 1 < times.min() <= times.max() < 1e6


def test_poison_fills_what_a_run_must_write(plan: Plan) -> None:
    program = plan.programs[0]
    with nimblert.load(plan, poison=True) as executable:
        found = {}
        for region, nbytes in ((Region.ARENA, program.arena_nbytes), (Region.OUTPUT, program.output_nbytes[0])):
            found[region] = np.zeros(nbytes, np.uint8)
            address = backend_of(executable).memory.address(Pointer(region=region))
            call("cuMemcpyDtoH", found[region].ctypes.data, address, nbytes)
        assert {region: set(content) for region, content in found.items()} == {
            Region.ARENA: {0xFF},
            Region.OUTPUT: {0xFF},
        }
        result = executable(image(2))
    assert isinstance(result, np.ndarray)
    assert result.tobytes() == logits(plan, image(2))


def test_a_process_without_a_framework_computes_the_same(plan: Plan, path: Path) -> None:
    with nimblert.load(plan) as executable:
        (expected,) = executable.run(golden.draw_inputs(executable.program, 1)).values()
    printed = python(REPLAY, path, *FRAMEWORKS, "nimblec", without=[*FRAMEWORKS, "nimblec"])
    assert printed.strip() == hashlib.sha256(expected.tobytes()).hexdigest()


def process(*arguments: object, given: object = "", sources: tuple[Path, ...] = SOURCES) -> str:
    """Return the output of ``python -m ARGUMENTS`` in the root of the repository, ``given`` on its standard input."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        input=str(given),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_check_in_a_process_of_its_own(path: Path) -> None:
    report = json.loads(process("nimblert.replay", "cuda", given=path, sources=(ROOT / "runtime",)))
    assert [(o["name"], o["verdict"]) for o in report["outputs"]] == [("output", "bit-exact")]
    assert all(seconds >= 0 for seconds in report["seconds"].values())


def test_the_command_line(tmp_path: Path) -> None:
    made = tmp_path / "digits.plan"
    printed = process("nimblec", "compile", "samples/digits.onnx", "-o", made, "--target", "cuda")
    assert "target: cuda" in printed
    assert f"wrote {made}" in printed.replace("\n", "")
    out = tmp_path / "out"
    process("nimblec", "run", made, "--input", "image=samples/digit_7.npy", "--output-dir", out, "--repeat", 20)
    assert np.load(out / "digit.npy").tolist() == [7]
    verified = process("nimblec", "verify", made)
    assert "FAILED" not in verified
    assert "output 'digit': bit-exact" in verified
    facts = json.loads(process("nimblec", "inspect", made, "--json"))
    assert facts["target"] == "cuda"
    assert facts["device"]["name"] == driver.describe().name
    assert facts["programs"][0]["commands"]["launch"] > 0
