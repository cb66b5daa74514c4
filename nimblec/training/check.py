"""Whether a graph of a step does what the optimizer itself does."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from nimblec.base.errors import TraceError, UnsupportedModelError, user_code
from nimblec.training.random import Draws
from nimblec.training.state import (
    OFFSET,
    SEED,
    Named,
    StepDefinition,
    TrainingState,
    initial_state,
    named_tensors,
    trained,
)
from nimblec.training.step import Step, trace
from nimblec.training.widening import in_float64, wide, widened

_CHECKED_STEPS = 3
_TOLERANCE = 1e-5
"""Relative to the largest magnitude of a tensor: what another order of sums may change in a step."""
_LEAST = 1e-5
"""Relative to the largest magnitude that a call changes: a smaller tensor may be zero up to rounding."""
_ROUNDED = 4 * torch.finfo(torch.float64).eps
"""The largest relative change of a number that stands for other rounding."""
_MARGIN = 100
"""Times the measured noise, which is one sample of rounding errors; other kernels' may be larger."""
_IN_FLOAT64 = "training_step: model and loss fail on the example batch, in float64, in which the step is checked"
_FEW = 2
"""Calls whose gradients are summed for a step here: more of them give the same graph."""


@in_float64()
def refuse_another_step(recipe: StepDefinition, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Step:
    """Return the step in float64, where its graph does what the optimizer does; else raise UnsupportedModelError.

    In float64, since an optimizer that divides by gradients makes a whole step of the rounding error of a zero one.
    Code that fails there, as it casts to float32 or holds such tensors, has these in float64, too.
    """
    try:
        return _checked(_double(recipe), inputs, targets)
    except TraceError:
        with suppress(TraceError):
            return _checked(_with_casts(_double(recipe)), inputs, targets)
        raise


def _checked(recipe: StepDefinition, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Step:
    batch = [wide(value) for value in (*inputs, *targets)]
    state = initial_state(recipe, draws=True)
    state = state.with_tensors([wide(value) for value in state.tensors()])
    # With the framework's gradients: in float64, those of grouped convolutions take many times as long written out.
    step = trace(recipe, state, batch[: recipe.inputs], batch[recipe.inputs :], exported=False)
    state = state.with_tensors([value.detach().clone() for value in state.tensors()])
    for number in range(1, _CHECKED_STEPS * recipe.accumulate + 1):
        wanted = _framework_call(recipe, state, batch, is_due=number % recipe.accumulate == 0)
        if not torch.isfinite(wanted["loss"]).all():
            raise UnsupportedModelError(
                f"training_step: the loss of call {number} on the example batch is {wanted['loss'].tolist()}, which "
                "tells nothing: give a batch, and a learning rate, that keep it finite"
            )
        found, after = _graph_call(step, state, batch)
        wrong = _differing(_held(state), wanted, found)
        if wrong is not None:
            wrong = _differing(_held(state), wanted, found, _rounding_noise(step, state, batch, found))
        if wrong is not None:
            raise UnsupportedModelError(
                f"training_step: {wrong!r} after call {number} is not what the optimizer makes of it: "
                f"{type(recipe.optimizer).__name__} keeps something that is not zero before the first step (give one "
                "that has taken a step), or the model computes something else in each call (what it keeps from one to "
                "the next has to be a buffer that it writes in place)"
            )
        state = _continued(after, wanted)
    return step


def _double(recipe: StepDefinition) -> StepDefinition:
    """Return a copy in float64, without autocast, which would leave float64 as it is and needs no scale there."""
    with user_code("training_step: model and optimizer cannot be copied"):
        model, optimizer = copy.deepcopy((recipe.model, recipe.optimizer), _kept_results(recipe.model))
    if model is recipe.model:
        raise TraceError("training_step: a copy of the model, by its __deepcopy__, is the model itself")
    model.double()
    loss = copy.deepcopy(recipe.loss).double() if isinstance(recipe.loss, nn.Module) else recipe.loss
    for kept in optimizer.state.values():
        kept |= {name: wide(value) for name, value in kept.items()}
    few = min(recipe.accumulate, _FEW)
    return replace(recipe, model=model, loss=loss, optimizer=optimizer, accumulate=few, autocast=None, constants={})


def _with_casts(recipe: StepDefinition) -> StepDefinition:
    """Return the same, and what model and loss cast to floats or read of them is in float64, too."""
    recipe.model.__dict__["forward"] = widened(recipe.model.forward)
    return replace(recipe, loss=widened(recipe.loss))


def _kept_results(model: nn.Module) -> dict[int, Any]:
    """Copy the results that a model has kept as attributes since an earlier call, which deepcopy refuses."""
    leaves = (leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module)))
    return {id(leaf): leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}


def _framework_call(recipe: StepDefinition, state: TrainingState, batch: Sequence[Tensor], *, is_due: bool) -> Named:
    """Return the loss, and what the framework's model and optimizer then hold; step if it ``is_due``.

    Random numbers are those of the ``state``; all else of the state is the model's and the optimizer's own.
    """
    model, optimizer = recipe.model, recipe.optimizer
    with user_code(_IN_FLOAT64), Draws(state.own[SEED], state.own[OFFSET]) as draws:
        loss = recipe.loss(model(*batch[: recipe.inputs]), *batch[recipe.inputs :])
        (loss / recipe.accumulate).backward()
    if is_due:
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    held = {**named_tensors(model), **_slots(model, optimizer)}
    return {"loss": loss.detach(), **held, OFFSET: state.own[OFFSET] + draws.used}


def _graph_call(step: Step, state: TrainingState, batch: Sequence[Tensor]) -> tuple[Named, TrainingState]:
    """Return what `_framework_call` returns, of the graph, and the whole state after the call."""
    with torch.no_grad():
        loss, *values = step.graph(*state.tensors(), *batch)
    after = state.with_tensors(values)
    return {"loss": loss, **_held(after), OFFSET: after.own[OFFSET]}, after


def _rounding_noise(step: Step, state: TrainingState, batch: Sequence[Tensor], found: Named) -> dict[str, float]:
    """Return the largest difference of each result from the one ``found``, when state and batch are rounded otherwise.

    It is what the step makes of rounding errors of its inputs and, as other numbers round otherwise, of its own.
    """
    generator = torch.Generator().manual_seed(0)
    other, _ = _graph_call(
        step,
        state.with_tensors([_rounded_otherwise(value, generator) for value in state.tensors()]),
        [_rounded_otherwise(value, generator) for value in batch],
    )
    return {name: _size(_numbers(value) - _numbers(other[name])) for name, value in found.items()}


def _rounded_otherwise(value: Tensor, generator: torch.Generator) -> Tensor:
    """Change float64 numbers, real or complex, by a few units in the last place; keep others, and whole ones.

    Whole numbers are exact: counters, masks and indices, which a model may compare.
    """
    if value.is_complex():
        return torch.view_as_complex(_rounded_otherwise(torch.view_as_real(value.resolve_conj()), generator))
    if value.dtype is not torch.float64:
        return value
    shares = 2 * torch.rand(value.shape, generator=generator, dtype=value.dtype).to(value.device) - 1
    return torch.where(value == value.round(), value, value * (1 + _ROUNDED * shares))


def _slots(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors that the optimizer keeps for parameters, as `TrainingState` names them."""
    return {
        f"{name}.{slot}": value.detach()
        for name, parameter in trained(model).items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _held(state: TrainingState) -> dict[str, Tensor]:
    """Return the part of it that the framework's model and optimizer hold."""
    return {**state.parameters, **state.buffers, **state.slots}


def _continued(state: TrainingState, given: Mapping[str, Tensor]) -> TrainingState:
    """Return the state for the next call: the framework's own, since a network may amplify rounding errors."""
    begun = {name: given.get(name, value).to(value.dtype, copy=True) for name, value in _held(state).items()}
    parts = {part: {name: begun[name] for name in getattr(state, part)} for part in ("parameters", "buffers", "slots")}
    return replace(state, **parts)


def _differing(
    before: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    noise: Mapping[str, float] = MappingProxyType({}),
) -> str | None:
    """Return the first tensor that is missing, or differs by more than another order of sums explains.

    ``before`` is the state before the call: a mask of huge numbers that stays as it is raises no tolerance.
    ``noise`` is what `_rounding_noise` found, where it was measured.
    """
    sizes = {name: max(_size(value), _size(before.get(name, value))) for name, value in wanted.items()}
    kept = {name for name in before.keys() & wanted if torch.equal(_numbers(before[name]), _numbers(wanted[name]))}
    least = _LEAST * max(1.0, *(size for name, size in sizes.items() if name not in kept))
    for name, value in wanted.items():
        tolerance = _TOLERANCE * max(sizes[name], least) if value.is_floating_point() else 0.0
        if value.is_floating_point() or value.is_complex():
            tolerance = max(tolerance, _MARGIN * noise.get(name, 0.0))
        if name not in found or not torch.allclose(_numbers(value), _numbers(found[name]), rtol=0, atol=tolerance):
            return name
    return None


def _numbers(tensor: Tensor) -> Tensor:
    """Return numbers in float64, of complex ones both parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _size(tensor: Tensor) -> float:
    """Return the largest finite magnitude of floating-point numbers."""
    values = tensor.abs().flatten() if tensor.is_floating_point() else tensor.new_empty(0)
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0
