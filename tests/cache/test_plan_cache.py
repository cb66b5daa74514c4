"""The plan cache: what is compiled twice is compiled once, and nothing else is taken for it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import OLD_PLAN, CommandLine
from plan_caching import Compiler, change_byte, compiled, onnx_source, unobserved, write_model
from plans import H200
from subprocesses import python

import nimblec
from nimblec import compiler
from nimblec.base.installation import environment, module_command
from nimblec.base.ir import BUSY
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.plan.plan_cache import compile_once
from nimblert.cuda import driver
from nimblert.plan import Target


def test_plan_cache_hit(nimblec: CommandLine, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, kept = tmp_path / "m.plan", tmp_path / "plans"
    command = ("compile", model, "-o", output, "--target", "cpu", "--dim", "n=4", "--plan-cache", kept, "-v")
    first = nimblec(*command)
    assert first.status == 0, first.err
    assert "taken from the plan cache" not in first.out
    written = output.read_bytes()
    output.write_bytes(OLD_PLAN)
    monkeypatch.setattr(compiler, "_compile", pytest.fail)
    second = nimblec(*command)
    assert second.status == 0, second.err
    assert output.read_bytes() == written
    notes = [line for line in second.out.splitlines() if line.startswith("note: ")]
    assert "taken from the plan cache; its compilation took " in notes[-1]
    key, stage = second.err.splitlines()
    assert (key.partition(":")[0], stage.partition(":")[0]) == ("find the plan's key", "read the plan cache")


HIT = """
import sys
from pathlib import Path
import nimblec
options = dict(target="cpu", dims={"n": 4}, plan_cache=Path(sys.argv[2]))
print(len(nimblec.compile(sys.argv[1], **options).kernels))
print(sorted({"torch", "triton", "onnxruntime", "scipy"} & set(sys.modules)))
"""


def test_a_plan_that_is_kept_needs_no_framework(tmp_path: Path, model: Path) -> None:
    first = python(HIT, model, tmp_path / "plans").splitlines()
    assert "onnxruntime" in first[1]
    assert python(HIT, model, tmp_path / "plans").splitlines() == [first[0], "[]"]


@pytest.mark.parametrize("kind", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_users_second_compilation_is_a_hit(tmp_path: Path, model: Path, kind: str) -> None:
    """With nothing in the environment that only the tests set, and the cache where a user has it."""
    if kind == "pt2":
        import torch

        model = tmp_path / "m.pt2"
        torch.export.save(torch.export.export(torch.nn.Linear(8, 8).eval(), (torch.zeros(4, 8),)), model)
    clean = {k: v for k, v in environment().items() if not k.startswith("ORT_")} | {"HOME": str(tmp_path / "home")}
    dims = ["--dim", "n=4"] if kind == "onnx" else []
    command = [*module_command("nimblec", "compile"), str(model), "-o", str(tmp_path / "m.plan"), "--target", "cpu"]
    first, second = (
        subprocess.run([*command, *dims], env=clean, capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    )
    assert "plan cache" not in first.replace("write the plan cache", "").replace("read the plan cache", "")
    assert "note: taken from the plan cache" in second


def test_a_model_that_was_moved_is_the_same(tmp_path: Path, model: Path, options: Options) -> None:
    stub = Compiler()
    compiled(stub, model, options)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("m.onnx", "weights.bin"):
        (tmp_path / name).rename(moved / name)
    compiled(stub, moved / "m.onnx", options)
    assert stub.calls == 1


def test_callables_and_live_modules_are_compiled_each_time(tmp_path: Path, options: Options) -> None:
    stub = Compiler()
    for kind in ("callable", "saved"):
        for _ in range(2):
            source = Source(kind=kind, model="package.module:name")
            compile_once(stub, source, Target.CUDA, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 4
    assert not (tmp_path / "plans").exists()


def test_plan_cache_keeps_exported_program(tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.pt2").write_bytes(b"exported")
    source, stub = Source(kind="exported", model=str(tmp_path / "m.pt2")), Compiler()
    monkeypatch.setattr(driver, "describe", lambda: H200)
    for target, calls in ((Target.CPU, 1), (Target.CUDA, 2)):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        for _ in range(2):
            compile_once(stub, source, target, options, tmp_path / "m.plan", unobserved)
            assert stub.calls == calls
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    compile_once(stub, source, Target.CUDA, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 2
    compile_once(stub, source, Target.CPU, options, tmp_path / "m.plan", unobserved)
    assert stub.calls == 3


def test_plan_cache_skips_model_written_meanwhile(tmp_path: Path, model: Path, options: Options) -> None:
    def write_and_write_back() -> None:
        change_byte(tmp_path / "weights.bin")
        change_byte(tmp_path / "weights.bin")

    for during in (lambda: write_model(model, seed=1, external=True), write_and_write_back):
        compiled(Compiler(during), model, options)
        assert list((tmp_path / "plans").iterdir()) == []
    stub = Compiler()
    compiled(stub, model, options)
    assert stub.calls == 1


def test_plan_chosen_by_disturbed_times_is_not_kept(model: Path, options: Options) -> None:
    """Its note advises to compile again, which would give the same plan."""
    stub = Compiler()

    def disturbed(*given: Any) -> tuple[str, ...]:
        return (*stub(*given), BUSY)

    for calls in (1, 2):
        assert compile_once(disturbed, onnx_source(model), Target.CPU, options, model.parent / "m.plan", unobserved)
        assert stub.calls == calls


def test_a_failed_compilation_is_not_kept(tmp_path: Path, options: Options) -> None:
    model = write_model(tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(nimblec.CompileError, match="dynamic dimension"):
            compiler.compile_model(model, options=replace(options, dims=()), observer=unobserved)
    assert list((tmp_path / "plans").iterdir()) == []


def test_no_plan_cache_is_none(nimblec: CommandLine, tmp_path: Path, model: Path, options: Options) -> None:
    stub = Compiler()
    for _ in range(2):
        compiled(stub, model, replace(options, plan_cache=None))
    assert stub.calls == 2
    command = ("compile", model, "-o", tmp_path / "m.plan", "--target", "cpu", "--dim", "n=4", "--no-plan-cache")
    assert "plan cache" not in nimblec(*command).out
    assert "--plan-cache" in nimblec.refused(*command, "--plan-cache", tmp_path / "plans")
    assert not (tmp_path / "plans").exists()
