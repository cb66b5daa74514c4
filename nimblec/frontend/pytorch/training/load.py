"""The state of a plan back into PyTorch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nimblec.errors import ArgumentError
from nimblec.frontend.pytorch.training.scaler import SCALE, TRACKER
from nimblec.frontend.pytorch.training.state import CALLS, OFFSET, SEED, SUM, named_tensors, rate_names
from nimblec.ir import LIBRARY_MEMORY

_OWN = frozenset({CALLS, SEED, OFFSET, SCALE, TRACKER})


def load_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """See `nimblec.load_state`."""
    known = {f"model.{name}": tensor for name, tensor in named_tensors(model).items()}
    values = {n: torch.from_numpy(np.array(a)) for n, a in state.items() if not n.startswith(LIBRARY_MEMORY)}
    _refuse_another(values, known)
    if scaler is not None:
        _load_scaler(values, scaler)
    if optimizer is not None:
        _load_optimizer(values, dict(model.named_parameters()), optimizer)
    with torch.no_grad():
        for name, tensor in known.items():
            if name in values:
                tensor.copy_(values[name])
    for name, parameter in model.named_parameters():
        gradient = values.get(f"{SUM}.{name}")
        if gradient is not None:
            parameter.grad = gradient.to(parameter) if values[CALLS] else None


def _load_optimizer(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
    kept = optimizer.state_dict()
    groups = kept["param_groups"]
    rates = {f"optimizer.{name}": group for name, group in zip(rate_names(len(groups)), groups, strict=True)}
    numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for name, value in values.items():
        part, _, path = name.partition(".")
        if name in rates:
            rates[name]["lr"] = float(value)
        elif part == "optimizer":
            path, _, slot = path.rpartition(".")
            number = numbers.get(id(parameters.get(path)))
            if number is None:
                raise ArgumentError(f"load_state: {name!r}: the optimizer has no such parameter: give the model's own")
            kept["state"].setdefault(number, {})[slot] = value
    optimizer.load_state_dict(kept)  # which brings them where it wants them


def _refuse_another(values: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError where a state is that of another model than the one whose tensors are ``known``."""
    for name, value in values.items():
        if name in known:
            if known[name].shape != value.shape:
                raise ArgumentError(
                    f"load_state: {name!r}: shape {tuple(value.shape)}, expected {tuple(known[name].shape)}"
                )
        elif not name.startswith(("optimizer.", f"{SUM}.")) and name not in _OWN:
            raise ArgumentError(
                f"load_state: {name!r} is no parameter or buffer of the model: give the model that was compiled"
            )


def _load_scaler(values: Mapping[str, Tensor], scaler: torch.amp.GradScaler) -> None:
    if SCALE not in values:
        raise ArgumentError(
            f"load_state: the state has no {SCALE!r}, as that of a step with autocast=torch.float16 has: "
            "leave scaler out"
        )
    own = {"scale": float(values[SCALE]), "_growth_tracker": int(values[TRACKER])}
    scaler.load_state_dict({**scaler.state_dict(), **own})
