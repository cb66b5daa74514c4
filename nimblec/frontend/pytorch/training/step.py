"""A training step as one graph: forward, loss, backward and update, as a function of parameters, state and a batch."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from nimblec.errors import UnsupportedModelError, user_code
from nimblec.frontend.pytorch.training.backward import decompositions

Named: TypeAlias = dict[str, Tensor]

_RATE = "lr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a step does: ``loss(model(*inputs), *targets)`` is a scalar to be made small.

    ``constants`` are what the optimizer keeps for each parameter, by name, that is no tensor.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    optimizer: Optimizer
    clip_norm: float | None
    constants: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that a step reads and writes, by name.

    ``parameters`` and ``buffers`` are the model's; ``slots`` those of the optimizer for a parameter, by
    "parameter.slot"; ``rates`` the learning rate of each group of parameters.
    """

    parameters: Named
    buffers: Named
    slots: Named
    rates: Named

    def tensors(self) -> list[Tensor]:
        """All of them, in order."""
        return [tensor for part in (self.parameters, self.buffers, self.slots, self.rates) for tensor in part.values()]


def initial_state(recipe: Recipe) -> TrainingState:
    """The state that the next step of the optimizer would find.

    Raises UnsupportedModelError for a parameter that no step updates, or that is none of the model's.
    """
    names = _names(recipe)
    slots: Named = {}
    for parameter, kept in _kept(recipe.optimizer).items():
        name = names[parameter]
        slots |= {f"{name}.{slot}": value for slot, value in kept.items() if isinstance(value, Tensor)}
        recipe.constants[name] = {slot: value for slot, value in kept.items() if not isinstance(value, Tensor)}
    groups = recipe.optimizer.param_groups
    rates = {
        name: torch.as_tensor(group[_RATE], dtype=torch.float32).clone()
        for name, group in zip(rate_names(len(groups)), groups, strict=True)
    }
    return TrainingState(
        parameters=dict(recipe.model.named_parameters()),
        buffers=dict(recipe.model.named_buffers()),
        slots=slots,
        rates=rates,
    )


def rate_names(groups: int) -> list[str]:
    """What the learning rates of so many groups are called."""
    return [_RATE] if groups == 1 else [f"{_RATE}_{i}" for i in range(groups)]


def _names(recipe: Recipe) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in recipe.model.named_parameters()}
    for group in recipe.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UnsupportedModelError("training_step: the optimizer updates a parameter that the model has not")
    return names


def _kept(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """What the optimizer keeps for each parameter; one that has not taken a step yet keeps zeros."""
    if optimizer.state:
        return {parameter: dict(kept) for parameter, kept in optimizer.state.items()}
    trial = copy.deepcopy(optimizer)  # with parameters of its own
    for group in trial.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with user_code("training_step: the optimizer cannot take a step"):
        trial.step()
    found = {}
    for group, copied in zip(optimizer.param_groups, trial.param_groups, strict=True):
        for parameter, other in zip(group["params"], copied["params"], strict=True):
            kept = trial.state[other]
            found[parameter] = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in kept.items()}
    return found


def trace(recipe: Recipe, state: TrainingState, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Any:
    """A graph of ATen calls from the tensors of a state and a batch to the loss and the tensors after the step."""
    sizes = [len(part) for part in (state.parameters, state.buffers, state.slots, state.rates)]

    def step(*flat: Tensor) -> tuple[Tensor, ...]:
        values = iter(flat)
        parts = [[next(values) for _ in range(size)] for size in sizes]
        named = (dict(zip(part, values, strict=True)) for part, values in zip(_parts(state), parts, strict=True))
        given = [next(values) for _ in inputs]
        loss, after = _step(recipe, TrainingState(**dict(zip(_FIELDS, named, strict=True))), given, list(values))
        return loss, *after.tensors()

    with _compiling(), user_code("training_step: the step cannot be traced"):
        traced = make_fx(step, decomposition_table=decompositions(), tracing_mode="fake")(
            *state.tensors(), *inputs, *targets
        )
    for node in reversed(traced.graph.nodes):
        if str(node.target).startswith("profiler."):  # of Optimizer.step
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


_FIELDS = ("parameters", "buffers", "slots", "rates")


def _parts(state: TrainingState) -> list[Named]:
    return [getattr(state, name) for name in _FIELDS]


def _step(
    recipe: Recipe, state: TrainingState, inputs: list[Tensor], targets: list[Tensor]
) -> tuple[Tensor, TrainingState]:
    """The loss, and the state after the step; what is given stays as it is."""
    parameters = {name: value.detach().requires_grad_() for name, value in state.parameters.items()}
    buffers = {name: value.clone() for name, value in state.buffers.items()}
    loss = recipe.loss(functional_call(recipe.model, {**parameters, **buffers}, tuple(inputs)), *targets)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    updated = {name: value.detach().clone() for name, value in parameters.items()}
    for value, gradient in zip(updated.values(), gradients, strict=True):
        value.grad = gradient
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(list(updated.values()), recipe.clip_norm, foreach=False)
    slots = {name: value.clone() for name, value in state.slots.items()}
    _stand_in(recipe, updated, slots, list(state.rates.values())).step()
    rates = {name: value.clone() for name, value in state.rates.items()}  # written, if as they were: they are state
    after = TrainingState(parameters=updated, buffers=buffers, slots=slots, rates=rates)
    return loss.detach(), after


def _stand_in(recipe: Recipe, parameters: Named, slots: Named, rates: list[Tensor]) -> Optimizer:
    """The optimizer over other tensors."""
    names = _names(recipe)
    made = copy.copy(recipe.optimizer)
    made.state = defaultdict(dict)
    for name, constants in recipe.constants.items():
        made.state[parameters[name]] = dict(constants)
    for path, value in slots.items():
        name, _, slot = path.rpartition(".")
        made.state[parameters[name]][slot] = value
    made.param_groups = [
        {**group, **_settings(group), _RATE: rate, "params": [parameters[names[p]] for p in group["params"]]}
        for group, rate in zip(recipe.optimizer.param_groups, rates, strict=True)
    ]
    return made


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of an optimizer whose step is a graph of tensors, each parameter by itself."""
    wanted = {"foreach": False, "fused": False, "capturable": True}
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
