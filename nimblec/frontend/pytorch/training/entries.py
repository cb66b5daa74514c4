"""The entries of a plan that trains: "train", which updates the parameters, and "evaluate", which reads them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nimblec.errors import ArgumentError, UnsupportedModelError
from nimblec.frontend.pytorch.training.step import Named, Recipe, TrainingState, initial_state, rate_names, trace

_CHECKED_STEPS = 3
_TOLERANCE = 1e-5
"""Relative to the largest magnitude of a tensor: what another order of sums may change in a few steps."""


class Train(nn.Module):
    """One step: writes the parameters and buffers of ``model`` and the state of the optimizer, and gives the loss.

    ``optimizer`` holds that state and the learning rate ("optimizer.lr") as buffers.
    """

    def __init__(self, model: nn.Module, state: TrainingState, graph: Any) -> None:
        super().__init__()
        self.training = False  # what a mode changes stands in the graph
        self.model = model
        self.optimizer = nn.Module()
        for name, tensor in {**state.slots, **state.rates}.items():
            _register(self.optimizer, name, tensor)
        self._graph = [graph]  # no part of the module: it has the same tensors as inputs
        self._state = state

    def forward(self, *batch: Tensor) -> dict[str, Tensor]:
        """The loss of a batch, before the step."""
        tensors = self.tensors()
        with torch.no_grad():
            loss, *after = self._graph[0](*tensors, *batch)
            for tensor, value in zip(tensors, after, strict=True):
                tensor.copy_(value)
        return {"loss": loss}

    def tensors(self) -> list[Tensor]:
        """Parameters, buffers, and the state of the optimizer, as a call finds them."""
        model = [_find(self.model, name) for name in (*self._state.parameters, *self._state.buffers)]
        return [*model, *(_find(self.optimizer, name) for name in (*self._state.slots, *self._state.rates))]


class Evaluate(nn.Module):
    """The model as it predicts, whatever mode it is in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = False
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        """What the model returns in evaluation mode."""
        was_training = [module for module in self.model.modules() if module.training]
        for module in was_training:
            module.training = False
        try:
            return self.model(*inputs)
        finally:
            for module in was_training:
                module.training = True


def entries(
    model: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: Optimizer,
    example_batch: tuple[Any, Any],
    *,
    clip_norm: float | None = None,
) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """See `nimblec.training_step`."""
    inputs, targets = _batch(example_batch)
    recipe = Recipe(model=model, loss=loss, optimizer=optimizer, clip_norm=clip_norm)
    if not all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModelError("training_step: a parameter does not require a gradient: make it a buffer")
    model.train()
    _refuse_another_step(recipe, inputs, targets)
    state = initial_state(recipe)
    module = Train(model, state, trace(recipe, state, inputs, targets))
    return {"train": (module, (*inputs, *targets)), "evaluate": (Evaluate(model), inputs)}


def _batch(example: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    def tensors(part: Any) -> tuple[Tensor, ...]:
        found = tuple(part) if isinstance(part, tuple | list) else (part,)
        if not found or not all(isinstance(tensor, Tensor) for tensor in found):
            raise ArgumentError("training_step: example_batch: expected (inputs, targets), each a tensor or several")
        return found

    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ArgumentError("training_step: example_batch: expected (inputs, targets), each a tensor or several")
    return tensors(example[0]), tensors(example[1])


def _refuse_another_step(recipe: Recipe, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    """Raise UnsupportedModelError where the graph of the step does not do what the optimizer itself does.

    In float64: what rounding leaves of a gradient that is zero is a whole step to an optimizer that divides by it.
    """
    model, optimizer = copy.deepcopy((recipe.model, recipe.optimizer))
    model.double()
    for kept in optimizer.state.values():
        kept |= {name: _wide(value) for name, value in kept.items()}
    wide = Recipe(model=model, loss=recipe.loss, optimizer=optimizer, clip_norm=recipe.clip_norm)
    inputs, targets = tuple(map(_wide, inputs)), tuple(map(_wide, targets))
    state = initial_state(wide)
    traced = copy.deepcopy(Train(model, state, trace(wide, state, inputs, targets)))
    for number in range(_CHECKED_STEPS):
        optimizer.zero_grad()
        value = recipe.loss(model(*inputs), *targets)
        value.backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        found = {"loss": traced(*inputs, *targets)["loss"], **_named(traced.model)}
        for name, wanted in {"loss": value.detach(), **_named(model)}.items():
            if not _close(wanted, found[name]):
                raise UnsupportedModelError(
                    f"training_step: {name!r} after step {number + 1} is not what the optimizer makes of it: the model "
                    f"draws random numbers, or {type(optimizer).__name__} keeps something that is not zero before the "
                    "first step: give one that has taken a step"
                )


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _named(model: nn.Module) -> Named:
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def _close(wanted: Tensor, found: Tensor) -> bool:
    if not wanted.is_floating_point():
        return bool(torch.equal(wanted, found))
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(torch.allclose(wanted, found, rtol=0, atol=_TOLERANCE * max(scale, 1e-6)))


def _register(root: nn.Module, path: str, tensor: Tensor) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.register_buffer(name, tensor)


def _find(root: nn.Module, path: str) -> Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        root = getattr(root, parent)
    found: Tensor = getattr(root, name)
    return found


def load_state(model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
    """See `nimblec.load_state`."""
    known = {f"model.{name}": tensor for name, tensor in _named(model).items()}
    names = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    rates = {f"optimizer.{name}": group for name, group in zip(rate_names(len(groups)), groups, strict=True)}
    values = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    for name, value in values.items():
        if name in known:
            if known[name].shape != value.shape:
                raise ArgumentError(
                    f"load_state: {name!r}: shape {tuple(value.shape)}, expected {tuple(known[name].shape)}"
                )
        elif not name.startswith("optimizer."):
            raise ArgumentError(
                f"load_state: {name!r} is no parameter or buffer of the model: give the model that was compiled"
            )
    with torch.no_grad():
        for name, value in values.items():
            if name in known:
                known[name].copy_(value)
            elif name in rates:
                rates[name]["lr"] = float(value)
            elif optimizer is not None:
                path, _, slot = name.rpartition(".")
                optimizer.state[names[f"model.{path.removeprefix('optimizer.')}"]][slot] = value
