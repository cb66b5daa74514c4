"""Compare calls of a plan with state, each from the state that the one before it left, with its models."""

from collections.abc import Mapping, Sequence

import numpy as np

from nimblec.cpu.reference import ReferenceModel, State
from nimblec.errors import CompileError
from nimblert import golden
from nimblert.executable import load
from nimblert.plan import Plan

_ROUNDS = 3
"""Calls of each entry that are compared."""

class DifferenceError(CompileError):
    """A plan computes something else than ONNX Runtime does with the model."""


def refuse_differing_steps(plan: Plan, references: Sequence[ReferenceModel]) -> None:
    """Raise DifferenceError where the programs of a plan, called in turns, leave another state than their models."""
    state: State = {}
    for reference in references:
        state = {**reference.first_state(), **state}
    with load(plan, threads=references[0].threads, poison=True) as executable:
        for seed in range(_ROUNDS):
            for program, reference in zip(plan.programs, references, strict=True):
                inputs = golden.draw_inputs(program, seed)
                outputs, state = reference.step(inputs, state)
                found = executable.run(inputs, entry=program.entry)
                _compare("output", dict(zip(found, outputs, strict=True)), found)
                _compare("state", {t.name: state[t.storage] for t in reference.state}, executable.state)


def _compare(what: str, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    for name, wanted in expected.items():
        if name in found and found[name].tobytes() != wanted.tobytes():
            raise DifferenceError(f"{what} {name!r}: after several calls it differs from ONNX Runtime's")
