"""The order of a compilation in the capture process, with stand-ins for the GPU: what is recorded, kept and told."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nimblec.base.errors import MissingPackageError, UnsupportedModelError
from nimblec.base.ir import Access, Buffer, BufferKind, CopyWork, Graph, Op, ProgramKey, Task, TensorView
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.cuda import check, selection, worker
from nimblec.cuda.capture import allocator, cupti, record
from nimblec.cuda.reports import Reports
from nimblec.cuda.request import CompileRequest
from nimblec.plan.lean import DifferingOutput
from nimblec.plan.planning import Measured
from nimblec.pytorch.model import TorchModel, place
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.errors import CudaError
from nimblert.plan import Device, Plan

MODULE = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
NBYTES = 32


def captured() -> Graph:
    """A copy of the input, (2, 4) float32."""
    written, read = (Access(buffer=buffer, offset=0, nbytes=NBYTES) for buffer in (1, 0))
    x, y = (
        TensorView(name=name, dtype="float32", shape=(2, 4), strides=(4, 1), buffer=buffer, offset=0)
        for buffer, name in enumerate("xy")
    )
    return Graph(
        modules=(),
        kernels=(),
        buffers=tuple(Buffer(kind=kind, nbytes=NBYTES) for kind in (BufferKind.INPUT, BufferKind.OUTPUT)),
        ops=(Op(name="copy", source=""),),
        tasks=(Task(op=0, work=CopyWork(dst=written, src=read), reads=(read,), writes=(written,)),),
        inputs=(x,),
        outputs=(y,),
    )


class Recorder:
    """Of a model that gives what it is given; the original of a rewritten one gives half as much again."""

    def __init__(self, model: TorchModel, shared: Any, others: Sequence[TorchModel]) -> None:
        del model, shared
        self.known = len(others)

    def refuse_hidden_state(self) -> None:
        """Nothing is hidden."""

    def warm_up(self) -> None:
        """Nothing is cold."""

    def record(self) -> SimpleNamespace:
        """A capture."""
        return SimpleNamespace(graph=captured(), notes=(f"{self.known} models are known",))

    def compute(self, inputs: Mapping[str, np.ndarray], model: TorchModel | None = None) -> list[np.ndarray]:
        """What the framework computes."""
        return [inputs["x"] * (1 if model is None else 1.5)]


class Timer:
    """Of plans that take as long as they have commands."""

    max_streams = 4
    least_gain = 0.02

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """Nanoseconds of each command."""
        return Measured([1000] * len(plan.programs[0].commands))

    def duration(self, plan: Plan) -> Measured[int]:
        """Nanoseconds of a run."""
        return Measured(1000 * len(plan.programs[0].commands))

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Lean:
    """The process without the framework: what it finds."""

    problem: DifferingOutput | None = None

    def __call__(self, _target: object) -> AbstractContextManager["Lean"]:
        """The process, begun."""
        return nullcontext(self)

    def differing_output(self, _plan: Path, *, run_s: float) -> DifferingOutput | None:
        """What differs."""
        del run_s
        return self.problem


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Lean:
    """Stand-ins for all that needs a GPU; what the check is to find."""
    found = Lean()
    gpu = SimpleNamespace(start=lambda: None, install=lambda: None, ignoring=nullcontext, check=lambda: None)
    monkeypatch.setattr(cupti, "CodeRecorder", lambda: gpu)
    monkeypatch.setattr(allocator, "BumpAllocator", lambda: gpu)
    monkeypatch.setattr(record, "ModelRecorder", Recorder)
    monkeypatch.setattr(selection, "CudaTimer", Timer)
    monkeypatch.setattr(check, "LeanProcess", found)
    monkeypatch.setattr(driver, "bindings", lambda: None)
    monkeypatch.setattr(driver, "initialise", lambda: None)
    device = Device(name="a GPU", compute_capability=(9, 0), driver_version=13010)
    monkeypatch.setattr(driver, "describe", lambda: device)
    return found


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *entries: str,
    level: int = 0,
    max_error: float | None = None,
    reproducible: bool = False,
) -> tuple[list[dict[str, Any]], int]:
    """What is told of a compilation to ``folder / "plan"``, stages left out, and the status."""

    def models(_request: CompileRequest) -> dict[ProgramKey, TorchModel]:
        return {(entry, ()): place(MODULE, (torch.ones(2, 4),), device="cpu") for entry in entries}

    monkeypatch.setattr(worker, "load_models", models)
    options = Options(level=level, max_error=max_error, reproducible=reproducible, timing_cache=folder / "times.json")
    source = Source(kind="callable", model="module:made")
    CompileRequest(source=source, options=options, output=folder / "plan", sys_path=()).save(folder)
    told = folder / "told"
    with told.open("w") as pipe:
        status = worker.main(str(folder), os.dup(pipe.fileno()))
    messages = [json.loads(line) for line in told.read_text().splitlines()]
    return [message for message in messages if "stage" not in message], status


@pytest.mark.usefixtures("lean")
def test_each_entry_is_recorded_beside_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told, status = compiled(monkeypatch, tmp_path, "first", "second")
    assert (told, status) == ([{"note": "2 models are known"}, {"note": "3 models are known"}], 0)
    plan = read_plan(tmp_path / "plan")
    assert [program.entry for program in plan.programs] == ["first", "second"]
    assert all(program.golden is not None and program.golden.tolerance == 0 for program in plan.programs)
    assert dict(plan.versions)["level"] == "-O0, first: as it runs, second: as it runs"
    assert plan.device.driver_version == 13000


@pytest.mark.usefixtures("lean")
def test_random_numbers_are_torchs_where_a_module_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing: list[object] = []
    monkeypatch.setattr(worker, "let_torch_draw", drawing.extend)
    assert compiled(monkeypatch, tmp_path, "main", level=1)[1] == 0
    assert not drawing
    assert compiled(monkeypatch, tmp_path, "first", "second")[1] == 0
    assert [type(model) for model in drawing] == [TorchModel, TorchModel]


@pytest.mark.usefixtures("lean")
def test_models_with_kernels_of_one_source_have_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.codecache import PyCodeCache

    kernels: list[object] = []
    monkeypatch.setattr(Recorder, "warm_up", lambda _: kernels.append(PyCodeCache.load("kernel = object()").kernel))
    assert compiled(monkeypatch, tmp_path, "first", "second")[1] == 0
    assert len(set(kernels)) == 2


@pytest.mark.usefixtures("lean")
def test_memory_that_was_not_there_is_what_ends_a_compilation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not what is wrong with tensors that have none."""

    def check() -> None:
        raise driver.CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(allocator.BumpAllocator(), "check", check)
    told, status = compiled(monkeypatch, tmp_path, "main", level=1)
    full = "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY; the GPU has not enough free memory: close other plans and processes"
    assert (told, status) == ([{"error": "CudaError", "message": f"{full} that use it"}], 2)


@pytest.mark.usefixtures("lean")
def test_reproducible_build_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither does torch: cuDNN and Inductor would choose by times of their own."""
    from torch._inductor import config

    with config.patch({"deterministic": False, "triton.autotune_pointwise": True}):
        torch.backends.cudnn.benchmark = True
        monkeypatch.delattr(selection, "CudaTimer")
        assert compiled(monkeypatch, tmp_path, "main", reproducible=True) == ([{"note": "1 models are known"}], 0)
        assert (config.deterministic, config.triton.autotune_pointwise) == (True, False)
        assert not torch.backends.cudnn.benchmark
    assert not (tmp_path / "times.json").exists()
    assert [command.duration_ns for _, command in read_plan(tmp_path / "plan").programs[0].work] == [0]


@pytest.mark.usefixtures("lean")
def test_a_rewritten_model_is_held_against_the_original(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told, status = compiled(monkeypatch, tmp_path, "main", level=1)
    assert (told[-1]["note"][:41], status) == ("output 'y' differs from -O0 by at most 0.", 0)
    told, status = compiled(monkeypatch, tmp_path, "main", level=1, max_error=0.1)
    assert (told[-1]["error"], status) == ("CompileError", 2)
    assert told[-1]["message"].endswith("; --max-error allows 0.1: use -O0 and --precision keep")


@pytest.mark.usefixtures("lean")
def test_a_variant_that_is_not_possible_is_told_by_name_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded: list[object] = []

    def record_second(_: Recorder) -> SimpleNamespace:
        recorded.append(None)
        if len(recorded) == 1:
            raise UnsupportedModelError("aten.mm in head: it is odd")
        return SimpleNamespace(graph=captured(), notes=())

    monkeypatch.setattr(Recorder, "record", record_second)
    told, status = compiled(monkeypatch, tmp_path, "main", level=1)
    notes = [
        "-O1 is not possible for this model, which is compiled as by -O0",
        "not possible for this model: fused regions: aten.mm in head: it is odd",
    ]
    assert (told, status) == ([{"note": note} for note in notes], 0)
    assert dict(read_plan(tmp_path / "plan").versions)["level"] == "-O1, as it runs"


def test_a_replay_that_differs_is_told_before_it_is_looked_into(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lean: Lean
) -> None:
    lean.problem = DifferingOutput(program="second", sentence="output 'y': the replay differs")
    monkeypatch.setattr("nimblec.cuda.diagnosis.first_difference", lambda recording, *_: f"of {recording.notes[0]}")
    told, status = compiled(monkeypatch, tmp_path, "first", "second")
    problem = "output 'y': the replay differs"
    failed = {"error": "CompileError", "message": f"{problem}; of 3 models are known"}
    assert (told[-2:], status) == ([{"problem": problem}, failed], 2)

    def no_memory(*_: object) -> str:
        raise CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr("nimblec.cuda.diagnosis.first_difference", no_memory)
    told, _ = compiled(monkeypatch, tmp_path, "first", "second")
    assert told[-1]["message"].startswith(f"{problem}; the first op whose result differs could not be found: cuMem")


def test_a_note_is_told_once() -> None:
    pipe = io.StringIO()
    reports = Reports(pipe)
    reports.note(["one", "two"])
    reports.note(["two", "three"])
    assert [json.loads(line) for line in pipe.getvalue().splitlines()] == [{"note": n} for n in ("one", "two", "three")]


def test_a_package_that_is_missing_is_told_with_the_extra_that_brings_it() -> None:
    pipe = io.StringIO()
    Reports(pipe).failure(ModuleNotFoundError("No module named 'torch'", name="torch"))
    told = json.loads(pipe.getvalue())
    assert told["error"] == MissingPackageError.__name__
    assert "pip install 'nimblec[compile]'" in told["message"]
