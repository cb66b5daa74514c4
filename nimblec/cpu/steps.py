"""Calls of a model one after the other, each from the state that the one before it left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from onnx import ModelProto

from nimblec.cpu.reference import run_reference
from nimblec.errors import CompileError
from nimblec.frontend.model_state import ModelState
from nimblert import golden
from nimblert.executable import load
from nimblert.plan import Plan, Profile

_ROUNDS = 3
"""Calls of each entry that are compared."""

Values: TypeAlias = dict[int, np.ndarray]
"""The tensors of a state by their storage, which is one for all entries."""


class DifferenceError(CompileError):
    """A plan computes something else than ONNX Runtime does of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The model of a program, as a plain ONNX Runtime session runs it, of these ``threads`` or as many as it likes.

    ``folder`` is where its external data are.
    """

    entry: str
    profile: Profile
    folder: Path
    proto: ModelProto
    state: tuple[ModelState, ...]
    threads: int | None = None

    def first_state(self) -> Values:
        """The state before the first call."""
        return {tensor.storage: tensor.data for tensor in self.state}

    def step(self, inputs: Mapping[str, np.ndarray], state: Values) -> tuple[list[np.ndarray], Values]:
        """One call: the outputs that a caller gets, and the state that it leaves."""
        given = {tensor.input: state[tensor.storage] for tensor in self.state}
        results = run_reference(self.proto, self.folder, {**inputs, **given}, threads=self.threads)
        values = dict(zip((value.name for value in self.proto.graph.output), results, strict=True))
        left = {tensor.storage: values.pop(tensor.output) for tensor in self.state if tensor.output}
        return list(values.values()), {**state, **left}


def refuse_differing_steps(plan: Plan, references: Sequence[Reference]) -> None:
    """Raise DifferenceError where calls of a plan's programs, in turns, leave another state than theirs does."""
    state: Values = {}
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
            raise DifferenceError(f"{what} {name!r}: after several calls it is not what ONNX Runtime leaves")
