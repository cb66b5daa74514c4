"""ONNX Runtime's optimiser in a process of its own: its crash, its refusals and its end."""

import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cpu_plans import floats, write_model
from onnx import TensorProto, helper

import nimblec
from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.cpu import ort_process, ort_worker
from nimblert import loading

node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.onnx", [node("Neg", ["x"], ["y"])], [floats("x", 3)], [floats("y", 3)])


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let the process run another script."""
    (folder / "script.py").write_text(script)
    monkeypatch.setattr(ort_worker, "__file__", str(folder / "script.py"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "import os; input(); os.kill(os.getpid(), 11)",
            r"ONNX Runtime crashed on this model \(SIGSEGV\): if an input",
        ),
        ("import os; input(); os.abort()", r"ONNX Runtime crashed on this model \(SIGABRT\): if an"),
        ("import os; os.kill(os.getpid(), 9)", r"more memory than there is: ONNX Runtime was killed \(SIGKILL\): free"),
        ("raise SystemExit(3)", "ONNX Runtime ended with status 3: if an"),
    ],
)
def test_the_end_of_the_process_is_told(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    started(monkeypatch, tmp_path, script)
    with pytest.raises(CompileError, match=said):
        nimblec.compile(path, target="cpu")


def test_a_large_model_for_a_process_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds."""
    weights = {"w": np.ones(1 << 20, np.float32)}
    nodes = [node("Mul", ["x", "w"], ["y"])]
    path = write_model(tmp_path / "m.onnx", nodes, [floats("x", 1)], [floats("y", 1 << 20)], constants=weights)
    started(monkeypatch, tmp_path, "")
    with pytest.raises(CompileError, match="ended with status 0"):
        nimblec.compile(path, target="cpu")


def test_lack_of_memory_is_told(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, tmp_path, 'input(); print(\'{"MemoryError": "bad allocation"}\', flush=True); input()')
    with pytest.raises(CompileError, match="the model needs more memory than there is: bad allocation"):
        nimblec.compile(path, target="cpu")


def test_a_process_refuses_a_model_and_takes_the_next(path: Path) -> None:
    bad = write_model(
        path.with_name("bad.onnx"), [node("MatMul", ["x", "x"], ["y"])], [floats("x", 2, 3)], [floats("y", 2, 2)]
    )
    with ort_process.own_process():
        process = ort_process._current.get()
        assert process is not None
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"refuses the model: .*Incompatible dimensions"):
                compile_here(bad)
            with loading.load(compile_here(path)) as model:
                assert model(np.ones(3, np.float32)).tolist() == [-1, -1, -1]
        assert process._process.poll() is None
    assert process._process.poll() == -signal.SIGKILL
    assert ort_process._current.get() is None


def observed(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> Path:
    """Return a model of nodes from x to y, and of a loop whose shape only a run shows."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["keep"], ["go"]), node("Neg", ["s"], ["next"])],
        "body",
        [info("i", TensorProto.INT64, ()), info("keep", TensorProto.BOOL, ()), info("s", TensorProto.FLOAT, None)],
        [info("go", TensorProto.BOOL, ()), info("next", TensorProto.FLOAT, None)],
    )
    loop = node("Loop", ["n", "", "y"], ["last"], body=body)
    outputs = [floats("y", 1, 2), floats("last", 1, 2)]
    constants = {"n": np.array(2), **constants}
    return write_model(path, [*nodes, loop], [floats("x", 1, 2)], outputs, constants=constants, opset=20)


def test_a_model_that_crashes_as_its_shapes_are_observed(path: Path) -> None:
    observed(path, [node("DFT", ["x"], ["y"], inverse=16)], {})
    with pytest.raises(CompileError, match=r"crashed on this model \(SIG|inverse: 16, expected 0 or 1"):
        nimblec.compile(path, target="cpu", plan_cache=None)


def test_shapes_are_observed_with_the_large_constants_of_a_model(path: Path) -> None:
    rows = {"r": np.arange(400, dtype=np.int64) % 2, "w": np.ones((400, 2), np.float32)}
    observed(path, [node("Gather", ["x", "r"], ["t"], axis=1), node("MatMul", ["t", "w"], ["y"])], rows)
    with loading.load(nimblec.compile(path, target="cpu", plan_cache=None)) as model:
        assert model.run({"x": np.ones((1, 2), np.float32)})["last"].tolist() == [[400, 400]]


def test_a_run_that_fails_as_shapes_are_observed(path: Path) -> None:
    observed(path, [node("Gather", ["x", "r"], ["y"], axis=1)], {"r": np.array([0, 7])})
    with pytest.raises(UnsupportedModelError, match=r"a run on random inputs failed: .*indices element out of data"):
        nimblec.compile(path, target="cpu", plan_cache=None)


def compile_here(path: Path) -> Any:
    """Return a plan, with the optimiser in the process of the block around."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ort_process, "own_process", contextlib.nullcontext)
        return nimblec.compile(path, target="cpu", plan_cache=None)


def test_nothing_of_nimblec_is_imported_by_the_process() -> None:
    """It would take longer to start."""
    lines = Path(ort_worker.__file__).read_text().splitlines()
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    assert {name.partition(".")[0] for name in imports} <= sys.stdlib_module_names
