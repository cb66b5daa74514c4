"""Whether a graph of a step does what the optimizer itself does."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.pytorch.training.random import Draws
from nimblec.frontend.pytorch.training.state import OFFSET, SEED, Recipe, initial_state, named_tensors
from nimblec.frontend.pytorch.training.step import Step, trace

_CHECKED_STEPS = 3
_TOLERANCE = 1e-5
"""Relative to the largest magnitude of a tensor: what another order of sums may change in a few steps."""
_FEW = 2
"""Calls whose gradients are summed for a step here: of more of them the graph has the same calls."""


def refuse_another_step(recipe: Recipe, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Step:
    """The step in float64, where its graph does what the optimizer does; else raise UnsupportedModelError.

    In float64: what rounding leaves of a gradient that is zero is a whole step to an optimizer that divides by it.
    Autocast leaves float64 as it is, and needs no scale there.
    """
    model, optimizer = copy.deepcopy((recipe.model, recipe.optimizer))
    model.double()
    for kept in optimizer.state.values():
        kept |= {name: _wide(value) for name, value in kept.items()}
    few = min(recipe.accumulate, _FEW)
    wide = replace(recipe, model=model, optimizer=optimizer, accumulate=few, autocast=None, constants={})
    inputs, targets = tuple(map(_wide, inputs)), tuple(map(_wide, targets))
    state = initial_state(wide, draws=True)
    state = state.with_tensors([_wide(value) for value in state.tensors()])
    # With the framework's gradients: in float64, those of grouped convolutions take many times as long written out.
    traced = trace(wide, state, inputs, targets, exported=False)
    values = [value.detach().clone() for value in state.tensors()]
    offset = state.own[OFFSET].clone()
    for number in range(_CHECKED_STEPS * wide.accumulate):
        with Draws(state.own[SEED], offset) as draws:
            value = recipe.loss(model(*inputs), *targets)
            (value / wide.accumulate).backward()
        offset += draws.used
        if (number + 1) % wide.accumulate == 0:
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss, *values = traced.graph(*values, *inputs, *targets)
        after = state.with_tensors(values)
        found = {"loss": loss, **after.parameters, **after.buffers, OFFSET: after.own[OFFSET]}
        for name, wanted in {"loss": value.detach(), **named_tensors(model), OFFSET: offset}.items():
            if not _close(wanted, found[name]):
                raise UnsupportedModelError(
                    f"training_step: {name!r} after call {number + 1} is not what the optimizer makes of it: "
                    f"{type(optimizer).__name__} keeps something that is not zero before the first step (give one that "
                    "has taken a step), or the model computes something else in each call"
                )
    return traced


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _close(wanted: Tensor, found: Tensor) -> bool:
    if not wanted.is_floating_point():
        return bool(torch.equal(wanted, found))
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(torch.allclose(wanted, found, rtol=0, atol=_TOLERANCE * max(scale, 1e-6)))
