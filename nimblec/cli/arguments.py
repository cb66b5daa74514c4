"""The command line's own notations: NAME:SHAPE[:DTYPE], NAME=SIZES, NAME=FILE.npy, NAME=VALUE, safe file names."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as shortened
from tokenize import TokenError
from typing import Any

import click
import numpy as np

from nimblec.base.errors import ArgumentError
from nimblec.base.options import (
    read_nbytes,
    read_numbers,
    read_shape,
    read_size,
    read_sizes,
    read_spec,
    read_streams,
)
from nimblert.arrays.layouts import numpy_dtype
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.plan.files import replacing


class Parsed(click.ParamType):
    """A parameter that a reader parses, such as those of `nimblec.base.options`; its ArgumentError becomes click's."""

    def __init__(self, name: str, reader: Callable[[str], Any]) -> None:
        self.name = name
        self._reader = reader

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse one value."""
        try:
            return self._reader(value)
        except ArgumentError as exc:
            raise click.BadParameter(str(exc), ctx, param) from exc


def _read_processors(value: str) -> int | tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", value, re.ASCII):
        raise ArgumentError(f"{value!r} is neither a number of threads nor a list of processors: 4, or 0,1,2,3")
    numbers = tuple(map(int, value.split(",")))
    return numbers if len(numbers) > 1 else numbers[0]


def _named(kind: str, reader: Callable[[str], Any], examples: str) -> Parsed:
    """Return the type of a parameter that gives a name something that ``reader`` parses."""

    def read(value: str) -> tuple[str, Any]:
        # Exporters name dimensions as they like, with equals signs too.
        name, _, given = value.rpartition("=")
        if not name:
            raise ArgumentError(f"{shortened(value)} is not NAME={kind}, such as {examples}")
        return name, reader(given)

    return Parsed(f"NAME={kind}", read)


def _read_named_file(value: str) -> tuple[str, Path]:
    name, _, file = value.partition("=")
    if not name or not file:
        raise ArgumentError(f"{value!r} is not NAME=FILE.npy, such as image=photo.npy")
    return name, Path(file)


def _read_constant(value: str) -> tuple[str, Path | np.ndarray]:
    name, _, given = value.partition("=")
    if not name or not given:
        raise ArgumentError(f"{value!r} is not NAME=VALUE, such as rate=16000 or mask=mask.npy")
    return name, Path(given) if given.endswith(".npy") else read_numbers(given)


SPEC = Parsed("NAME:SHAPE[:DTYPE]", read_spec)
STREAMS = Parsed("auto|1|max|N", read_streams)
NBYTES = Parsed("BYTES", read_nbytes)
PROCESSORS = Parsed("N|P,P", _read_processors)
NAMED_SIZES = _named("SIZES", read_sizes, "batch=4, batch=1,2,4 or batch=1..9")
NAMED_SIZE = _named("SIZE", read_size, "batch=4")
NAMED_SHAPE = _named("SHAPE", read_shape, "boxes=100x4")
NAMED_FILE = Parsed("NAME=FILE.npy", _read_named_file)
CONSTANT = Parsed("NAME=VALUE", _read_constant)


def read_arrays(given: Iterable[tuple[str, Path | np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays of ``NAME=FILE.npy`` and ``NAME=VALUE`` options by name, each given once."""
    arrays: dict[str, np.ndarray] = {}
    for name, array in given:
        if name in arrays:
            raise InputError(f"input {name!r} was given twice: give it once")
        arrays[name] = read_array(array) if isinstance(array, Path) else array
    return arrays


_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
"""Errors of numpy for an impossible header."""


def read_array(path: Path) -> np.ndarray:
    """Return the array in an .npy file; OSError if it cannot be read, InputError if it is something else."""
    if path.exists() and not path.is_file():  # reading a pipe may never end
        raise InputError(f"{path}: is not a regular file, expected an .npy file")
    try:
        array = np.load(path, allow_pickle=False)
    except _DAMAGED as exc:
        raise InputError(f"{path}: not an .npy file, or a damaged one: write it with numpy.save") from exc
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: an .npz archive, expected one array: write it with numpy.save")
    return array


def restore_dtype(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return ``array`` as bfloat16 if the tensor is: numpy writes that dtype as 2 raw bytes."""
    raw = array.dtype.kind == "V" and array.dtype.itemsize == ITEM_NBYTES[tensor.dtype]
    return array.view(numpy_dtype(tensor.dtype)) if raw else array


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return a file name for each tensor name: letters, digits, ``.``, ``_`` and ``-``, no two the same."""
    taken: set[str] = set()
    chosen: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:100] or "output"
        candidate, count = stem, 1
        while candidate.lower() in taken:  # some file systems ignore case
            count += 1
            candidate = f"{stem}_{count}"
        taken.add(candidate.lower())
        chosen[name] = f"{candidate}.npy"
    return chosen


def write_arrays(directory: Path, arrays: Mapping[str, np.ndarray]) -> tuple[Path, ...]:
    """Write each array as NAME.npy, each file atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = tuple(directory / file for file in file_names(arrays).values())
    for path, array in zip(paths, arrays.values(), strict=True):
        with replacing(path) as file:
            np.save(file, array, allow_pickle=False)
    return paths
