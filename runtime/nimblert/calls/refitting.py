"""What `Executable.refit` is given: arrays for weights by name, checked before one byte is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray
from nimblert.calls.entries import Take, checked_array
from nimblert.errors import InputError
from nimblert.files import safetensors
from nimblert.plan import Plan, Program, Region, Tensor

NewWeights: TypeAlias = Mapping[str, Any] | str | PathLike[str]
"""Arrays by the name of a weight, or the path of a safetensors file."""

@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A refit to be done. ``arrays`` are for its inputs, in their order; None: a weight that stays as it is."""

    program: Program
    arrays: tuple[np.ndarray | DeviceArray | None, ...]


def replaceable(plan: Plan) -> dict[str, Tensor]:
    """The weights that can be replaced, by name."""
    return {tensor.name: tensor for refit in plan.refits for tensor in refit.inputs}


def checked(plan: Plan, weights: NewWeights, take: Take) -> list[Refit]:
    """The refits that replace these weights. ``take`` reads arrays that are on a GPU.

    Raises InputError where an array is not what its weight is, or lacks another one that one constant is made of both.
    """
    given = safetensors.read(weights) if isinstance(weights, str | PathLike) else weights
    if not isinstance(given, Mapping):
        raise InputError(
            f"refit: got {type(given).__name__}, expected a dict of arrays by name, or the path of a safetensors file"
        )
    known = replaceable(plan)
    for name in given:
        if name not in known and not _is_counter(name):
            raise InputError(_unknown(name, list(known)))
    arrays = {name: _checked(known[name], value, take) for name, value in given.items() if name in known}
    chosen = [refit for refit in plan.refits if any(tensor.name in arrays for tensor in refit.inputs)]
    return [Refit(program=refit, arrays=_of(refit, arrays)) for refit in chosen]


def _checked(weight: Tensor, value: Any, take: Take) -> np.ndarray | DeviceArray:
    array = checked_array("weight", weight, value, take)
    if tuple(array.shape) != weight.shape:
        raise InputError(f"weight {weight.name!r}: shape {tuple(array.shape)}, expected {weight.shape}")
    return array


def _of(refit: Program, arrays: Mapping[str, np.ndarray | DeviceArray]) -> tuple[np.ndarray | DeviceArray | None, ...]:
    """The arrays for the inputs of a refit; those that do not lie in the plan must all be there."""
    missing = [t.name for t in refit.inputs if t.pointer.region is not Region.WEIGHTS and t.name not in arrays]
    if missing:
        found = next(tensor.name for tensor in refit.inputs if tensor.name in arrays)
        raise InputError(
            f"weight {found!r}: the plan holds it folded with {', '.join(map(repr, missing))}: give these, too"
        )
    return tuple(arrays.get(tensor.name) for tensor in refit.inputs)


def _is_counter(name: object) -> bool:
    """Whether a name is that of the batches that a norm of PyTorch has seen: in every state_dict, read in training."""
    return str(name).rpartition(".")[2] == "num_batches_tracked"


def _unknown(name: object, known: list[str]) -> str:
    if not known:
        return f"weight {name!r}: the plan has no weights that a refit replaces: compile with --refittable"
    meant = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {meant[0]!r}? Else" if meant else "where the model has it,"
    return (
        f"weight {name!r}: not one of the {len(known)} that the plan can replace; {hint} it was folded or repacked "
        "(compile with --refittable), or no output depends on it (leave it out)"
    )
