"""Compare calls of a plan with state, each from the state that the one before it left, with its models."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from nimblec.base.errors import CompileError
from nimblec.cpu.agreement import Agreed
from nimblec.cpu.reference import run_feeds
from nimblert import golden
from nimblert.loading import load
from nimblert.plan import Plan

_ROUNDS = 3
"""Calls of each entry that are compared."""

_State: TypeAlias = dict[int, np.ndarray]
"""The tensors of a state by their storage, which all entries share."""


def refuse_differing_steps(plan: Plan, models: Sequence[Agreed[Any]]) -> None:
    """Raise CompileError where programs of a plan, called in turns, leave another state than their optimised models.

    All run on one thread, so that they must agree bit for bit.
    """
    state = {tensor.storage: tensor.data for model in models for tensor in model.source.state}
    with load(plan, threads=1, poison=True) as executable:
        for seed in range(_ROUNDS):
            for program, model in zip(plan.programs, models, strict=True):
                inputs = golden.draw_inputs(program, seed)
                outputs, state = _step(model, inputs, state)
                found = executable.run(inputs, entry=program.entry)
                _compare("output", dict(zip(found, outputs, strict=True)), found)
                _compare("state", {t.name: state[t.storage] for t in model.source.state}, executable.state)


def _step(model: Agreed[Any], inputs: Mapping[str, np.ndarray], state: _State) -> tuple[list[np.ndarray], _State]:
    """Return one call: the outputs that a caller gets, and the state that it leaves."""
    source, optimized = model.source, model.optimized
    feed = {**inputs, **{tensor.input: state[tensor.storage] for tensor in source.state}}
    names = [value.name for value in source.proto.graph.output]
    (found,) = run_feeds(optimized.proto, optimized.folder, names, [feed], threads=1)
    if isinstance(found, str):
        raise CompileError(f"ONNX Runtime cannot run the model on random inputs: {found}")
    values = dict(zip(names, found, strict=True))
    left = {tensor.storage: values.pop(tensor.output) for tensor in source.state if tensor.output}
    return list(values.values()), {**state, **left}


def _compare(what: str, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    for name, wanted in expected.items():
        if name in found and found[name].tobytes() != wanted.tobytes():
            raise CompileError(f"{what} {name!r}: after several calls it differs from ONNX Runtime's")
