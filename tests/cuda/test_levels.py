"""-O1: fewer kernels, the same results but for rounding, and what cannot be rewritten is compiled all the same."""

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from eager import build
from verdicts import verdicts

import nimblert
from nimblec.base.difference import difference
from nimblec.base.errors import CompileError
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblec.optimize.pipeline import Setting
from nimblec.optimize.rewrites import REGIONS, REWRITES
from nimblert import golden
from nimblert.golden import Verdict
from nimblert.plan import Launch, Plan

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

FUSED = (*(f"gpu_models:{name}" for name in ("transformer", "perceptron", "pooled", "tied")), "samples/digits.onnx")
ODD = tuple(f"gpu_models:{name}" for name in ("aliases", "layouts", "past_the_dispatcher", "lazy_table"))
"""What they return or launch is hard to say in a graph."""
STATEFUL = ("gpu_models:stateful", "gpu_models:secluded")
"""Write into their own state; the second one into its input as well, so it is no graph of pure calls."""


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for level in (1, 0):
        gpu_compiler.start(*FUSED, *ODD, *STATEFUL, level=level)


def launches(plan: Plan) -> int:
    program = plan.programs[0]
    return sum(isinstance(c, Launch) for c in program.commands)


@pytest.mark.parametrize("model", [*FUSED, *ODD, *STATEFUL])
def test_the_replay_gives_what_the_rewritten_model_computed(gpu_compiler: "GpuCompiler", model: str) -> None:
    assert verdicts(gpu_compiler.plan(model, level=1)) == {Verdict.BIT_EXACT}


@pytest.mark.parametrize("model", [*FUSED, *ODD])
def test_no_more_kernels_and_nearly_the_same_results(gpu_compiler: "GpuCompiler", model: str) -> None:
    plain, fused = (gpu_compiler.plan(model, level=level) for level in (0, 1))
    assert launches(fused) <= launches(plain)
    inputs = golden.draw_inputs(plain.programs[0], 5)
    with nimblert.load(plain) as a, nimblert.load(fused) as b:
        expected, found = a.run(inputs), b.run(inputs)
    assert list(expected) == list(found)
    for name, array in expected.items():
        assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape)
        assert difference(array, found[name]).relative < 2e-2


@pytest.mark.parametrize("model", STATEFUL)
def test_state_that_a_model_writes_goes_on(gpu_compiler: "GpuCompiler", model: str) -> None:
    plan = gpu_compiler.plan(model, level=1)
    reference = build(model)
    with nimblert.load(plan) as executable:
        for seed in (1, 2, 3):
            inputs = golden.draw_inputs(executable.program, seed)
            expected = reference(list(inputs.values()))
            for a, b in zip(expected, executable.run(inputs).values(), strict=True):
                assert difference(a, b).relative < 1e-5


def test_a_model_that_no_compiler_takes_is_compiled_as_it_runs(tmp_path: Path) -> None:
    options = Options(target="cuda", level=1)
    made = compile_model("gpu_models:secluded", options=options, output=tmp_path / "m", observer=lambda *_: None)
    assert "-O1 is not possible for this model, which is compiled as by -O0" in made.notes
    assert ("level", "-O1, as it runs") in made.plan.versions


def test_level_2_keeps_the_fastest_of_several(tmp_path: Path) -> None:
    options = Options(target="cuda", level=2)
    made = compile_model("gpu_models:transformer", options=options, output=tmp_path / "m", observer=lambda *_: None)
    (tried,) = (note for note in made.notes if note.startswith("tried "))
    assert all(way in tried for way in ("Triton kernels", "as it runs"))
    assert verdicts(made.plan) == {Verdict.BIT_EXACT}


def test_passes_are_noted_in_their_order(tmp_path: Path) -> None:
    options = Options(target="cuda", level=1, print_passes=True)
    made = compile_model("gpu_models:perceptron", options=options, output=tmp_path / "m", observer=lambda *_: None)
    noted = [found for note in made.notes if (found := re.fullmatch(r"(\w+): (\w+): (\d+) calls -> (\d+)", note))]
    phases = [phase for phase in (*REWRITES.phases, *REGIONS.phases) if phase.when(Setting())]
    passes = [each.name for phase in phases for each in phase.passes]
    assert [found[2] for found in noted] == passes
    assert all(a[4] == b[3] for a, b in pairwise(noted))


@pytest.mark.parametrize("streams", ["1", "max"])
def test_level_2_writes_concatenations_in_place(tmp_path: Path, streams: str) -> None:
    options = Options(target="cuda", level=2, streams=streams)
    made = compile_model("gpu_models:concatenating", options=options, output=tmp_path / "m", observer=lambda *_: None)
    program = made.plan.programs[0]
    names = [program.ops[command.op].name for command in program.commands if isinstance(command, Launch)]
    assert any("convolution_into" in name for name in names), names
    assert not any("cat" in name for name in names), names
    assert verdicts(made.plan) == {Verdict.BIT_EXACT}


@pytest.mark.parametrize("level", [0, 1])
def test_half_precision_keeps_inputs_and_outputs(tmp_path: Path, level: int) -> None:
    options = Options(target="cuda", level=level, precision="fp16", max_error=0.05)
    made = compile_model("samples/digits.onnx", options=options, output=tmp_path / "m.plan", observer=lambda *_: None)
    program = made.plan.programs[0]
    assert [t.dtype for t in (*program.inputs, *program.outputs)] == ["float32", "int64", "float32"]
    assert {w.dtype for w in made.plan.weights} <= {"float16", "int64"}
    assert verdicts(made.plan) == {Verdict.BIT_EXACT}


def test_an_error_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    options = Options(target="cuda", level=1, max_error=0.0)
    with pytest.raises(CompileError, match="--max-error allows 0"):
        compile_model("gpu_models:transformer", options=options, output=tmp_path / "m.plan", observer=lambda *_: None)
    assert not (tmp_path / "m.plan").exists()
