"""The definition of a training step, and the state that it reads and writes, by name."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nimblec.base.errors import UnsupportedModelError, user_code
from nimblec.training.scaler import initial_scaler

Named: TypeAlias = dict[str, Tensor]

MODEL, OPTIMIZER = "model", "optimizer"
"""The step's names for the model and for what the optimizer keeps."""
RATE = "lr"
CALLS, SUM = "accumulated_calls", "accumulated"
SEED, OFFSET = "generator.seed", "generator.offset"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefinition:
    """The definition of a step, which minimises the scalar ``loss(model(*inputs), *targets)``.

    The model takes that many ``inputs``; ``groups`` are the names of the parameters in each of the optimizer's. It
    steps on every ``accumulate``-th call, with the mean of their gradients; ``constants`` is its state for each
    parameter, by name, that is not a tensor. Model and loss run under torch.autocast to ``autocast``.
    """

    model: nn.Module
    loss: Callable[..., Tensor]
    optimizer: Optimizer
    inputs: int
    groups: tuple[tuple[str, ...], ...]
    clip_norm: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    constants: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """All that a step reads and writes, by name.

    ``parameters`` are those of the model that are trained, ``buffers`` its other tensors; ``slots`` those of the
    optimizer for a parameter, by "parameter.slot"; ``rates`` the learning rate of each group of parameters; ``own``
    what the step keeps besides: the sum of gradients for each parameter and how many calls have added to it, seed and
    offset of its generator, the scale of its loss.
    """

    parameters: Named
    buffers: Named
    slots: Named
    rates: Named
    own: Named

    def tensors(self) -> list[Tensor]:
        """Return all of them, in order."""
        return [tensor for part in self.parts().values() for tensor in part.values()]

    def parts(self) -> dict[str, Named]:
        """Return the fields, by name."""
        return {name: getattr(self, name) for name in ("parameters", "buffers", "slots", "rates", "own")}

    def with_tensors(self, tensors: Sequence[Tensor]) -> "TrainingState":
        """Return the same names for other tensors, in order."""
        values = iter(tensors)
        parts = self.parts().items()
        return TrainingState(**{part: {name: next(values) for name in named} for part, named in parts})


def initial_state(recipe: StepDefinition, *, draws: bool) -> TrainingState:
    """Return the state that the next step of the optimizer would find; ``draws`` for a step that draws numbers."""
    parameters = trained(recipe.model)
    names = {parameter: name for name, parameter in parameters.items()}
    slots: Named = {}
    for parameter, kept in kept_by(recipe.optimizer).items():
        name = names[parameter]
        slots |= {f"{name}.{slot}": value for slot, value in kept.items() if isinstance(value, Tensor)}
        recipe.constants[name] = {slot: value for slot, value in kept.items() if not isinstance(value, Tensor)}
    groups = recipe.optimizer.param_groups
    rates = {
        name: torch.as_tensor(group[RATE], dtype=torch.float32).clone()
        for name, group in zip(rate_names(len(groups)), groups, strict=True)
    }
    if hidden := [path for path in slots if path.partition(".")[0] in rates]:
        raise UnsupportedModelError(
            f"training_step: the state holds the learning rate as 'optimizer.{hidden[0].partition('.')[0]}', where it "
            f"would hold 'optimizer.{hidden[0]}', too: rename that part of the model"
        )
    own: Named = initial_scaler() if recipe.autocast is torch.float16 else {}
    if recipe.accumulate > 1:
        own |= {f"{SUM}.{name}": torch.zeros_like(value).detach() for name, value in parameters.items()}
        own[CALLS] = torch.tensor(0)
    if draws:
        seed = torch.initial_seed()
        own |= {SEED: torch.tensor(seed - (seed >> 63 << 64)), OFFSET: torch.tensor(0)}
    buffers = {**frozen(recipe.model), **dict(recipe.model.named_buffers())}
    return TrainingState(parameters=parameters, buffers=buffers, slots=slots, rates=rates, own=own)


def autocasting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return torch.autocast to a type on a device; a context that does nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def rate_names(groups: int) -> list[str]:
    """Return the names of the learning rates of that many ``groups``."""
    return [RATE] if groups == 1 else [f"{RATE}_{i}" for i in range(groups)]


def group_names(model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Return the names of the trained parameters in each group of an optimizer.

    Raises UnsupportedModelError if it updates one that is not the model's, if none of the model's is trained, and for
    what a step cannot have.
    """
    _refuse_unsuitable(model, optimizer)
    if not trained(model):
        raise UnsupportedModelError("training_step: no parameter of the model requires a gradient: let some train")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if not names.keys() >= {*group["params"]}:
            raise UnsupportedModelError(
                "training_step: the optimizer updates a parameter that the model does not have: give it "
                "model.parameters()"
            )
    groups = ([p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups)
    return tuple(tuple(names[parameter] for parameter in group) for group in groups)


def _refuse_unsuitable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UnsupportedModelError for hooks, which copies lose, lazy parameters, and modules that have two names."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedModelError(f"training_step: parameter {name!r} has no shape yet: run the model once")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedModelError(
                f"training_step: parameter {name!r} has a hook, which a plan cannot run: compute it in forward or loss"
            )
    first: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(module, name) != name and any(True for _ in (*module.parameters(), *module.buffers())):
            raise UnsupportedModelError(
                f"training_step: {first[module]!r} and {name!r} are one module, which torch.export does not tell apart "
                "from two: keep it by one name, and call it by that"
            )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedModelError(
            "training_step: the optimizer has a hook, which a plan cannot run: do its work between steps"
        )


def trained(model: nn.Module) -> Named:
    """Return the parameters that require a gradient, by the first of their names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen(model: nn.Module) -> Named:
    """Return the parameters that require no gradient, by the first of their names."""
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def kept_by(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizer's state for each parameter that is trained; zeros before the first step with it."""
    found = {parameter: dict(kept) for parameter, kept in optimizer.state.items() if parameter.requires_grad}
    if found.keys() >= {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}:
        return found
    trial = copy.deepcopy(optimizer)
    pairs = [
        (parameter, other)
        for group, copied in zip(optimizer.param_groups, trial.param_groups, strict=True)
        for parameter, other in zip(group["params"], copied["params"], strict=True)
    ]
    for parameter, other in pairs:
        is_new = parameter.requires_grad and parameter not in found
        other.grad = torch.zeros_like(other) if is_new else None
    with user_code("training_step: the optimizer cannot take a step"):
        trial.step()
    for parameter, other in pairs:
        if other.grad is not None:
            kept = trial.state[other]
            found[parameter] = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in kept.items()}
    return found


def named_tensors(model: nn.Module) -> Named:
    """Return the parameters and buffers of a model."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
