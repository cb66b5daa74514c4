"""The state of a plan back into PyTorch."""

from collections import defaultdict
from collections.abc import Mapping
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nimblec.base.errors import ArgumentError
from nimblec.base.ir import LIBRARY_MEMORY
from nimblec.pytorch.tensors import as_tensor
from nimblec.training.scaler import SCALE, TRACKER
from nimblec.training.state import (
    CALLS,
    MODEL,
    OFFSET,
    OPTIMIZER,
    RATE,
    SEED,
    SUM,
    Named,
    kept_by,
    named_tensors,
    rate_names,
)

_OWN = frozenset({CALLS, SEED, OFFSET, SCALE, TRACKER})
_LIKE = "give one like that of the step"
_ALL = "give all that a plan's state has"


def load_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """See `nimblec.load_state`."""
    _check_kind("model", model, nn.Module, "torch.nn.Module")
    _check_kind("optimizer", optimizer, Optimizer | None, "torch.optim.Optimizer")
    _check_kind("scaler", scaler, torch.amp.GradScaler | None, "torch.amp.GradScaler")
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ArgumentError(
            f"load_state: state: got {type(state).__name__}, expected arrays by name, as a plan's state is: exe.state, "
            "or what safetensors loads"
        )
    values = {name: _tensor(name, value) for name, value in state.items() if LIBRARY_MEMORY not in name}
    tensors = {f"{MODEL}.{name}": tensor for name, tensor in named_tensors(model).items()}
    sums = {f"{SUM}.{name}": parameter for name, parameter in model.named_parameters()}
    _refuse_another(values, {**tensors, **sums})
    _refuse_without_tensors(values, tensors)
    scale = None if scaler is None else _scale(values)
    if optimizer is not None:
        _load_optimizer(values, dict(model.named_parameters()), optimizer)
    if scaler is not None and scale is not None:
        scaler.load_state_dict({**scaler.state_dict(), **scale})
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in values:
                tensor.copy_(values[name])
    for name, parameter in sums.items():
        if name in values:
            parameter.grad = values[name].to(parameter) if values[CALLS] else None


def _check_kind(name: str, value: object, kind: type | UnionType, expected: str) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(f"load_state: {name}: got {type(value).__name__}, expected a {expected}")


def _tensor(name: str, value: Any) -> Tensor:
    """Return a copy of an array of any dtype that a state has."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    array = np.array(value)
    try:
        return as_tensor(array)
    except (TypeError, ValueError) as exc:
        raise ArgumentError(f"load_state: {name!r}: got {array.dtype}, which cannot become a tensor") from exc


def _refuse_another(values: Named, known: Named) -> None:
    """Raise ArgumentError where a state is that of another model than the one whose tensors are ``known``."""
    for name, value in values.items():
        if name in known:
            _check_shape(name, value, known[name])
        elif not name.startswith(f"{OPTIMIZER}.") and name not in _OWN:
            raise ArgumentError(
                f"load_state: {name!r} is not a parameter or buffer of the model: give the model that was compiled"
            )
    for name, needed in ((f"{SUM}.", CALLS), (SCALE, TRACKER)):
        if needed not in values and any(found.startswith(name) for found in values):
            raise ArgumentError(f"load_state: the state has no {needed!r}: {_ALL}")


def _refuse_without_tensors(values: Named, tensors: Named) -> None:
    """Raise ArgumentError where a state lacks tensors that the state of a plan has.

    A plan leaves out tensors of the model that no call writes. So a state has some of the model's, and each
    of those for which it has a sum of gradients, or state of the optimizer.
    """
    parts = [(part, path) for part, _, path in (name.partition(".") for name in values)]
    kept = {path.rpartition(".")[0] for part, path in parts if part == OPTIMIZER}
    kept |= {path for part, path in parts if part == SUM}
    is_bare = values.keys().isdisjoint(tensors)
    for name in tensors:
        if name not in values and (is_bare or name.removeprefix(f"{MODEL}.") in kept):
            raise ArgumentError(f"load_state: the state has no {name!r}: {_ALL}")


def _check_shape(name: str, value: Tensor, expected: Tensor) -> None:
    if value.shape != expected.shape:
        raise ArgumentError(f"load_state: {name!r}: shape {tuple(value.shape)}, expected {tuple(expected.shape)}")


def _scale(values: Named) -> dict[str, float]:
    """Return the state of a GradScaler."""
    if SCALE not in values:
        raise ArgumentError(
            f"load_state: the state has no {SCALE!r}, which only a step with autocast=torch.float16 has: "
            "leave scaler out"
        )
    return {"scale": float(values[SCALE]), "_growth_tracker": int(values[TRACKER])}


def _load_optimizer(values: Named, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    kept = optimizer.state_dict()
    groups = kept["param_groups"]
    rates = {f"{OPTIMIZER}.{name}": group for name, group in zip(rate_names(len(groups)), groups, strict=True)}
    slots: dict[str, Named] = defaultdict(dict)
    for name, value in values.items():
        part, _, path = name.partition(".")
        if name in rates:
            rate = torch.as_tensor(rates[name][RATE])
            _check_shape(name, value, rate)
            rates[name][RATE] = value.to(rate) if isinstance(rates[name][RATE], Tensor) else float(value)
        elif part == OPTIMIZER:
            path, _, slot = path.rpartition(".")
            slots[path][slot] = value
    expected = kept_by(optimizer)
    if not slots and any(expected.values()):
        raise ArgumentError(f"load_state: the state has nothing that {type(optimizer).__name__} keeps: {_LIKE}")
    for path, parameter in parameters.items():
        wanted = _tensors(expected.get(parameter, {}))
        if wanted and path not in slots and f"{MODEL}.{path}" in values:
            raise ArgumentError(f"load_state: the state has no '{OPTIMIZER}.{path}.{next(iter(wanted))}': {_ALL}")
    numbers = {p: n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for path, found in slots.items():
        owner = parameters.get(path)
        if owner is None or owner not in numbers:
            name = ".".join(filter(None, (OPTIMIZER, path, next(iter(found)))))
            part = "parameter: give the model's own" if path else f"group of parameters: {_LIKE}"
            raise ArgumentError(f"load_state: {name!r}: the optimizer has no such {part}")
        own = expected.get(owner, found)
        _refuse_other_slots(path, found, own)
        kept["state"][numbers[owner]] = {**own, **found}
    # `load_state_dict` moves the tensors to their parameters' device.
    optimizer.load_state_dict(kept)


def _tensors(kept: Mapping[str, Any]) -> Named:
    return {slot: value for slot, value in kept.items() if isinstance(value, Tensor)}


def _refuse_other_slots(path: str, found: Named, own: Mapping[str, Any]) -> None:
    """Raise ArgumentError where these tensors are not those that an optimizer keeps as its ``own`` for a parameter."""
    wanted = _tensors(own)
    if wanted.keys() != found.keys():
        raise ArgumentError(
            f"load_state: for {path!r} the state has {sorted(found)}, the optimizer keeps {sorted(wanted)}: {_LIKE}"
        )
    for slot, value in wanted.items():
        _check_shape(f"{OPTIMIZER}.{path}.{slot}", found[slot], value)
