"""CUDA plans with faults, which are checked while a GPU starts: what is reported, and what is left behind."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plans import cuda_plan

import nimblert
from nimblec.plan import encoder
from nimblert.errors import PlanError
from nimblert.plan import Plan, Record, Wait


def _altered(image: bytes) -> bytes:
    return image[:-1] + bytes([image[-1] ^ 1])


def _without_events(plan: Plan) -> Plan:
    (program,) = plan.programs
    commands = tuple(command for command in program.commands if not isinstance(command, Record | Wait))
    return replace(plan, programs=(replace(program, commands=commands, event_count=0),))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: _altered(encoder.encode_file(plan)), r"was altered after it was written"),
        (lambda plan: encoder.encode_file(replace(plan, kernels=())), r"kernel: 0 is out of range"),
        (lambda plan: encoder.encode_file(_without_events(plan)), r"nothing orders their accesses"),
    ],
    ids=["altered", "contradictory", "unordered"],
)
def test_plan_fault_comes_before_machine(change: Callable[[Plan], bytes], sentence: str) -> None:
    strange = replace(cuda_plan().device, compute_capability=(99, 0))
    with pytest.raises(PlanError, match=sentence):
        nimblert.load(change(replace(cuda_plan(), device=strange)))
