"""The arguments of `Executable.refit`: arrays for weights by name, checked before anything is written."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nimblert.arrays.dlpack import DeviceArray
from nimblert.arrays.layouts import numpy_dtype
from nimblert.calls.entries import Take, array_of_shape
from nimblert.errors import InputError
from nimblert.plan import Plan, Program, Region, Tensor
from nimblert.plan.external import DTYPES

NewWeights: TypeAlias = Mapping[str, Any] | str | PathLike[str]
"""Arrays by the name of a weight, or the path of a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A refit to do. ``arrays`` are for its inputs, in order; None keeps a weight as it is."""

    program: Program
    arrays: tuple[np.ndarray | DeviceArray | None, ...]


def replaceable(plan: Plan) -> dict[str, Tensor]:
    """Return the replaceable weights by name."""
    return {tensor.name: tensor for refit in plan.refits for tensor in refit.inputs}


def checked(plan: Plan, weights: NewWeights, take: Take) -> list[Refit]:
    """Return the refits that replace these weights; ``take`` is for arrays on a GPU.

    Raises InputError where an array differs from its weight in dtype or shape, or where a constant is made of several
    weights and one of them is missing.
    """
    if isinstance(weights, str | PathLike):
        with opened(weights) as found:
            return checked(plan, found, take)
    if not isinstance(weights, Mapping):
        raise InputError(
            f"refit: got {type(weights).__name__}, expected a dict of arrays by name, or the path of a safetensors file"
        )
    known = replaceable(plan)
    for name in weights:
        # PyTorch's batch counter of a batch norm, which only training uses, may be there.
        if name not in known and str(name).rpartition(".")[2] != "num_batches_tracked":
            raise InputError(_unknown(name, weights, known, plan.refits))
    arrays = {
        name: array_of_shape("weight", known[name], weights[name], take) for name in weights if name in known
    }
    chosen = [refit for refit in plan.refits if any(tensor.name in arrays for tensor in refit.inputs)]
    return [Refit(program=refit, arrays=_of(refit, arrays)) for refit in chosen]


def _of(refit: Program, arrays: Mapping[str, np.ndarray | DeviceArray]) -> tuple[np.ndarray | DeviceArray | None, ...]:
    """Return the arrays for the inputs of a refit. Raises InputError where a folded weight is missing."""
    missing = [t.name for t in refit.inputs if t.pointer.region is not Region.WEIGHTS and t.name not in arrays]
    if missing:
        found = next(tensor.name for tensor in refit.inputs if tensor.name in arrays)
        raise InputError(
            f"weight {found!r}: the plan holds it folded with {', '.join(map(repr, missing))}: give these, too"
        )
    return tuple(arrays.get(tensor.name) for tensor in refit.inputs)


def _unknown(name: Any, weights: Mapping[str, Any], known: Mapping[str, Tensor], refits: Sequence[Program]) -> str:
    """Say that the plan has no weight of this name, and which other weight of its shape may be meant."""
    if not known:
        return f"weight {name!r}: the plan has no weights that a refit replaces: compile with --refittable"
    from difflib import get_close_matches

    shape = getattr(weights[name], "shape", ())
    alike = [other for other, tensor in known.items() if tensor.shape == tuple(shape) and other not in weights]
    meant = get_close_matches(str(name), alike, n=1)
    hint = f"did you mean {meant[0]!r}? Else" if meant else "the model may name it otherwise (see `weights`), or"
    is_refittable = any(tensor.pointer.region is not Region.WEIGHTS for refit in refits for tensor in refit.inputs)
    folded = "" if is_refittable else " it was folded or repacked (compile with --refittable), or"
    return (
        f"weight {name!r}: not one of the {len(known)} that the plan can replace; {hint}{folded} no output depends on "
        "it (leave it out)"
    )


class Arrays(Mapping[str, np.ndarray]):
    """The arrays in an open safetensors file by name; each is read, into new memory, when it is asked for."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._keys = frozenset(file.keys())

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: str) -> np.ndarray:
        # The outline refuses names that no plan has.
        self.outline(key)
        found: np.ndarray = self._file.get_tensor(key)
        return found

    def outline(self, key: str) -> np.ndarray:
        """Return an array of the same dtype and shape, for checks, without reading it. Raises InputError, KeyError."""
        if key not in self._keys:
            raise KeyError(key)
        described = self._file.get_slice(key)
        dtype = described.get_dtype()
        if dtype not in DTYPES:
            raise InputError(f"{self._name}: {key!r} has dtype {dtype}, which no plan has: convert it")
        try:
            return np.broadcast_to(np.zeros((), numpy_dtype(DTYPES[dtype])), described.get_shape())
        except ValueError as exc:
            raise InputError(f"{self._name}: {key!r} has a shape that no array has: {exc}") from exc


@contextmanager
def opened(path: str | PathLike[str]) -> Iterator[Arrays]:
    """Open a safetensors file. Raises InputError where it cannot be read."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as exc:
        raise InputError("a safetensors file needs a package to read it: pip install 'nimblert[safetensors]'") from exc
    name = os.fspath(path)
    try:
        if Path(name).exists() and not Path(name).is_file():  # opening a pipe may never end
            raise InputError(f"{name}: is no regular file, expected a safetensors file")
        file = safe_open(name, framework="numpy")
    except (OSError, SafetensorError) as exc:
        raise InputError(f"{name}: is no safetensors file that can be read: {exc}") from exc
    with file:
        yield Arrays(file, name)


def write(path: str | PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, all or nothing. Raises InputError without the package, NimbleError for the file."""
    try:
        from safetensors import numpy as files
    except ImportError as exc:
        raise InputError("a safetensors file needs a package to write it: pip install 'nimblert[safetensors]'") from exc
    # Imported here: most processes write no file.
    from nimblert.plan.files import replacing

    content = files.save(dict(arrays))
    with replacing(path) as file:
        file.write(content)
