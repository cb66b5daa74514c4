"""Recurrent networks, hidden state, awkward modules and broken rewrites on the GPU, at -O1 and -O2."""

from pathlib import Path
from typing import TYPE_CHECKING

import awkward_models
import eager
import numpy as np
import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves
from verdicts import verdicts

import nimblert
from nimblec.base.difference import difference
from nimblec.base.errors import CompileError
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblert import golden
from nimblert.golden import Verdict
from nimblert.plan import Launch, Memcpy, Plan

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

AWKWARD = ("recurrent", "recurrent_from", "norms", "convolutions", "buffers", "resizes")
LSTM, ASSIGNING = "gpu_models:lstm", "gpu_models:assigning"


@pytest.fixture(scope="module", autouse=True)
def _compiling(gpu_compiler: "GpuCompiler") -> None:
    for level in (2, 1, 0):
        gpu_compiler.start(LSTM, ASSIGNING, level=level)
    gpu_compiler.start(*(f"awkward_models:{name}" for name in AWKWARD), level=1)
    gpu_compiler.start("awkward_models:half_network", level=2)


def _commands(plan: Plan) -> int:
    program = plan.programs[0]
    return sum(isinstance(command, (Launch, Memcpy)) for command in program.commands)


def _ops(plan: Plan) -> set[str]:
    program = plan.programs[0]
    return {program.ops[command.op].name for command in program.commands if isinstance(command, Launch)}


def test_an_lstm_is_cudnns_with_its_weights_in_one_buffer(gpu_compiler: "GpuCompiler") -> None:
    plain, plan = gpu_compiler.plan(LSTM, level=0), gpu_compiler.plan(LSTM, level=1)
    assert any("_cudnn_rnn" in name for name in _ops(plan))
    assert _commands(plan) <= _commands(plain)  # no copies of weights


@pytest.mark.parametrize("level", [1, 2])
def test_an_lstm_is_what_eager_computes(gpu_compiler: "GpuCompiler", level: int) -> None:
    plan = gpu_compiler.plan(LSTM, level=level)
    assert any("lstm_layer" in name for name in _ops(plan)) == (level == 2)
    inputs = golden.draw_inputs(plan.programs[0], 1)
    expected = eager.build(LSTM)(list(inputs.values()))
    with nimblert.load(plan, poison=True) as executable:
        for wanted, found in zip(expected, executable.run(inputs).values(), strict=True):
            assert difference(wanted, found).relative < 5e-3


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_state_in_an_attribute_is_refused_alike_at_every_level(gpu_compiler: "GpuCompiler", level: int) -> None:
    with pytest.raises(CompileError, match=r"^Refused: two runs on equal inputs differ in output .*register_"):
        gpu_compiler.plan(ASSIGNING, level=level)


def _compare(plan: Plan, name: str) -> None:
    """Compare a plan's outputs with eager's, on the model's example."""
    module, args, kwargs = awkward_models.build(name)
    reference = eager.Eager(module, args, kwargs)
    arrays = [eager.as_array(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    program = plan.programs[0]
    with nimblert.load(plan, poison=True) as executable:
        found = executable.run({tensor.name: a for tensor, a in zip(program.inputs, arrays, strict=True)})
    for wanted, got in zip(reference(arrays), found.values(), strict=True):
        assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
        if wanted.dtype.kind in "biu":
            np.testing.assert_array_equal(got, wanted)
        else:
            assert difference(wanted, got).relative < 1e-2


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_model_is_what_eager_computes(gpu_compiler: "GpuCompiler", name: str) -> None:
    plan = gpu_compiler.plan(f"awkward_models:{name}", level=1)
    assert ("level", "-O1, fused regions") in plan.versions
    assert verdicts(plan) <= {Verdict.BIT_EXACT, Verdict.WITHIN_TOLERANCE}
    _compare(plan, name)


def test_our_kernels_compute_in_bfloat16_what_eager_does(gpu_compiler: "GpuCompiler") -> None:
    _compare(gpu_compiler.plan("awkward_models:half_network", level=2), "half_network")


def test_rewrite_failure_closes_level_only(tmp_path: Path) -> None:
    options = Options(target="cuda", level=1)
    made = compile_model("gpu_models:breaking", options=options, output=tmp_path / "m", observer=lambda *_: None)
    assert "-O1 is not possible for this model, which is compiled as by -O0" in made.notes
    assert any(
        note.startswith(
            "not possible for this model: fused regions: IndexError: vector::_M_range_check (gpu_models.py, line"
        )
        for note in made.notes
    )
    assert verdicts(made.plan) == {Verdict.BIT_EXACT}
