"""A training step as one graph: forward, loss, backward and update, as a function of parameters, state and a batch."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from nimblec.errors import UnsupportedModelError, user_code
from nimblec.frontend.pytorch.training.backward import decompositions
from nimblec.frontend.pytorch.training.random import Draws, refuse_other_draws
from nimblec.frontend.pytorch.training.state import (
    CALLS,
    OFFSET,
    RATE,
    SEED,
    SUM,
    Named,
    Recipe,
    TrainingState,
)

_Gradients: TypeAlias = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A graph of ATen calls from the tensors of a state and a batch to the loss and the tensors after the step."""

    graph: Any
    draws: bool
    """Whether it draws random numbers."""


def trace(
    recipe: Recipe, state: TrainingState, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, exported: bool
) -> Step:
    """The step as a graph for the device that the state is on.

    ``exported``: its gradients are written in operators that exporters know; else they are the framework's own.
    Raises TraceError where the code cannot be one, UnsupportedModelError for random numbers that a kernel draws.
    """
    count, draws = len(state.tensors()), False

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        nonlocal draws
        found = state.with_tensors(flat[:count])
        left = state.with_tensors([value.clone() for value in flat[:count]])
        batch = flat[count:]
        loss, draws = take_step(recipe, found, left, batch[: len(inputs)], batch[len(inputs) :])
        return loss, *left.tensors()

    flat = (*state.tensors(), *inputs, *targets)
    table = decompositions(exported=exported)
    with user_code("training_step: the step cannot be traced"):
        traced = make_fx(step, decomposition_table=table, tracing_mode="fake")(*flat)
    for node in reversed(traced.graph.nodes):
        if str(node.target).startswith("profiler."):  # of Optimizer.step
            traced.graph.erase_node(node)
        refuse_other_draws(node.target, node.args, node.kwargs)
    traced.recompile()
    return Step(graph=traced, draws=draws)


def take_step(
    recipe: Recipe, found: TrainingState, left: TrainingState, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[Tensor, bool]:
    """The loss, and whether random numbers were drawn; what the step leaves is written into ``left``.

    That has the values of the state that the step ``found``. Where it is the same, the optimizer takes its step by
    those of its own kernels that a CUDA graph can hold; else as a graph of tensors. Raises UnsupportedModelError
    where the backward pass draws random numbers.
    """
    parameters = {name: value.detach().requires_grad_() for name, value in found.parameters.items()}
    draws = Draws(found.own[SEED], found.own[OFFSET]) if SEED in found.own else None
    with torch.enable_grad(), draws or nullcontext():
        loss = recipe.loss(functional_call(recipe.model, {**parameters, **left.buffers}, tuple(inputs)), *targets)
        used = draws.used if draws else 0
        mean = loss / recipe.accumulate if recipe.accumulate > 1 else loss
        gradients = torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)
    if draws and draws.used > used:
        raise UnsupportedModelError(
            "the backward pass draws random numbers, as activation checkpointing does that runs dropout twice: leave "
            "dropout out of what is checkpointed"
        )
    named = dict(zip(parameters, gradients, strict=True))
    with torch.no_grad():
        if used:
            left.own[OFFSET].add_(used)
        update = partial(_update, recipe, left, itself=left is found)
        if recipe.accumulate > 1:
            _accumulate(recipe, left, named, update)
        else:
            update(named)
    return loss.detach(), used > 0


def _accumulate(
    recipe: Recipe, left: TrainingState, gradients: _Gradients, update: Callable[[_Gradients], None]
) -> None:
    """Add to the sums of gradients, and take the optimizer's step if enough calls have: decided by the tensors."""
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    sums = {name: left.own[f"{SUM}.{name}"].add_(gradient) for name, gradient in known.items()}
    calls = left.own[CALLS].add_(1)
    is_due = calls == recipe.accumulate
    written = [*left.parameters.values(), *left.slots.values()]
    before = [value.clone() for value in written]
    update({name: sums[name].clone() if name in sums else None for name in gradients})
    for value, old in zip(written, before, strict=True):
        value.copy_(torch.where(is_due, value, old))
    for value in (*sums.values(), calls):
        value.copy_(torch.where(is_due, torch.zeros_like(value), value))


def _update(recipe: Recipe, left: TrainingState, gradients: _Gradients, *, itself: bool) -> None:
    """The optimizer's step by these gradients, which it may change."""
    if recipe.clip_norm is not None:  # which writes into them
        gradients = _apart(gradients)
    parameters = {name: value.detach() for name, value in left.parameters.items()}
    for name, value in parameters.items():
        value.grad = gradients[name]
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(list(parameters.values()), recipe.clip_norm, foreach=None if itself else False)
    is_captured = itself and all(value.is_cuda for value in parameters.values())
    with nullcontext() if is_captured else _compiling():
        _stand_in(recipe, parameters, left, itself=itself).step()


def _apart(gradients: _Gradients) -> _Gradients:
    """Each in memory of its own, as ``grad`` is: those of two parameters that are added are one tensor."""
    found: dict[str, Tensor | None] = {}
    held: set[int] = set()
    for name, gradient in gradients.items():
        found[name] = gradient
        if gradient is not None:
            storage = gradient.untyped_storage()
            if storage._cdata in held or storage.nbytes() < gradient.nbytes:
                found[name] = gradient.clone()
            held.add(storage._cdata)
    return found


def _stand_in(recipe: Recipe, parameters: Named, left: TrainingState, *, itself: bool) -> Optimizer:
    """The optimizer over other tensors."""
    made = copy.copy(recipe.optimizer)
    made.state = defaultdict(dict)
    for name, constants in recipe.constants.items():
        made.state[parameters[name]] = dict(constants)
    for path, value in left.slots.items():
        name, _, slot = path.rpartition(".")
        made.state[parameters[name]][slot] = value
    made.param_groups = [
        {**group, **_settings(group, itself=itself), RATE: rate, "params": [parameters[name] for name in names]}
        for group, names, rate in zip(recipe.optimizer.param_groups, recipe.groups, left.rates.values(), strict=True)
    ]
    for group in made.param_groups:
        if not itself and "capturable" not in group:  # SGD, which else reads the number
            group[RATE] = group[RATE].detach().requires_grad_()
    return made


def _settings(group: Mapping[str, Any], *, itself: bool) -> dict[str, Any]:
    """Of an optimizer that reads its rate from the device: its own kernels, or each parameter by itself."""
    if not itself:
        wanted = {"foreach": False, "fused": False, "capturable": True}
    elif "capturable" in group:
        wanted = {"capturable": True}
    else:  # SGD, whose other kernels take the rate from the host
        wanted = {"foreach": False, "fused": True}
    return {name: value for name, value in wanted.items() if name in group}


@contextmanager
def _compiling() -> Iterator[None]:
    """Have torch's optimizers compute with tensors where they otherwise read numbers of them."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
