"""A training step in less memory: activations are computed again, and nothing else changes."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import training_steps

import nimblec
import nimblert
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblec.cpu.stretches import Joiner
from nimblec.inspect.parts import parts_of
from nimblert.plan import Launch, Plan, Program

if TYPE_CHECKING:
    from gpu_compile import GpuCompiler

pytest_plugins = ("gpu_compile",)


def trained(plan: Plan) -> dict[str, np.ndarray]:
    """Return the losses of five steps, and the state after them."""
    with nimblert.load(plan, poison=True) as executable:
        batch = [tensor.numpy() for tensor in training_steps.deep_batch()]
        losses = [np.asarray(executable(*batch, entry="train")) for _ in range(5)]
        return {"losses": np.stack(losses), **{name: np.array(value) for name, value in executable.state.items()}}


def train_program(plan: Plan) -> Program:
    return next(program for program in plan.programs if program.entry == "train")


def launch_count(plan: Plan) -> int:
    """Return the number of launches in the train program, each node of one counted."""
    program = train_program(plan)
    return sum(len(parts_of(plan, command)) for command in program.commands if isinstance(command, Launch))


def check(plain: Plan, small: Plan, limit: int) -> None:
    after = train_program(small)
    assert after.arena_nbytes <= limit
    assert launch_count(plain) < launch_count(small) < 1.5 * launch_count(plain)
    assert after.schedule is not None
    assert after.schedule.policy.startswith("recompute-")
    expected, found = trained(plain), trained(small)
    assert len({loss.tobytes() for loss in expected["losses"]}) == len(expected["losses"])
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not np.array_equal(value, found[name])] == []


def test_two_thirds_of_the_memory_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"train": training_steps.deep()["train"]}
    with monkeypatch.context() as patch:
        patch.setattr(Joiner, "join", lambda _, graph, schedule: (graph, schedule))  # with all results in the arena
        plain = nimblec.compile(step, target="cpu", streams="1")
    limit = train_program(plain).arena_nbytes * 2 // 3
    check(plain, nimblec.compile(step, target="cpu", memory_limit=limit), limit)


@pytest.mark.gpu
def test_it_does_on_a_gpu(gpu_compiler: "GpuCompiler", tmp_path: Path) -> None:
    plain = gpu_compiler.plan("training_steps:deep", streams="1")
    limit = train_program(plain).arena_nbytes * 2 // 3
    options, output = Options(target="cuda", level=0, memory_limit=limit), tmp_path / "small.plan"
    small = compile_model("training_steps:deep", options=options, output=output, observer=lambda *_: None).plan
    check(plain, small, limit)
