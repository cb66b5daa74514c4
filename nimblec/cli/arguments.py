"""The command line's own notations: NAME:SHAPE[:DTYPE], NAME=SIZES, NAME=FILE.npy, NAME=VALUE, safe file names."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as shortened
from tokenize import TokenError
from typing import TypeVar

import click
import numpy as np

from nimblec.base.errors import ArgumentError
from nimblec.base.options import (
    InputSpec,
    NamedInput,
    read_nbytes,
    read_numbers,
    read_size,
    read_sizes,
    read_spec,
    read_streams,
)
from nimblert.arrays.layouts import numpy_dtype
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.plan.files import replacing

T = TypeVar("T")


def _read(
    reader: Callable[[str], T],
    value: str,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> T:
    """Apply a reader of `nimblec.base.options`, and turn its error into click's."""
    try:
        return reader(value)
    except ArgumentError as exc:
        raise click.BadParameter(str(exc), ctx, param) from exc


class Spec(click.ParamType):
    """The type of ``compile --input``."""

    name = "NAME:SHAPE[:DTYPE]"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> InputSpec | NamedInput:
        """Parse one value."""
        return _read(read_spec, value, param, ctx)


class Streams(click.ParamType):
    """auto, 1, max, or a number of streams."""

    name = "auto|1|max|N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The policy, as `Options.streams` takes it."""
        return _read(read_streams, value, param, ctx)


class Nbytes(click.ParamType):
    """A number of bytes, with a unit if wanted."""

    name = "BYTES"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        return _read(read_nbytes, value, param, ctx)


class Processors(click.ParamType):
    """A number of threads, or the processors that they run on."""

    name = "N|P,P"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        """The number, or those of the processors, as `nimblert.load` takes them."""
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", value, re.ASCII):
            self.fail(f"{value!r} is neither a number of threads nor a list of processors: 4, or 0,1,2,3", param, ctx)
        numbers = tuple(map(int, value.split(",")))
        return numbers if len(numbers) > 1 else numbers[0]


class NamedSizes(click.ParamType):
    """The type of ``compile --dim``, split at the last equals sign: exporters name dimensions as they like."""

    name = "NAME=SIZES"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        """The name and the sizes."""
        name, _, sizes = value.rpartition("=")
        if not name:
            self.fail(f"{shortened(value)} is not NAME=SIZES, such as batch=4, batch=1,2,4 or batch=1..9", param, ctx)
        return name, _read(read_sizes, sizes, param, ctx)


class NamedSize(click.ParamType):
    """The type of ``run --dim``, split as that of ``compile --dim``."""

    name = "NAME=SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """The name and the size."""
        name, _, size = value.rpartition("=")
        if not name:
            self.fail(f"{shortened(value)} is not NAME=SIZE, such as batch=4", param, ctx)
        return name, _read(read_size, size, param, ctx)


class NamedFile(click.ParamType):
    """The type of ``NAME=FILE.npy``, split at the first equals sign."""

    name = "NAME=FILE.npy"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Split one value; the file is read later."""
        name, _, file = value.partition("=")
        if not name or not file:
            self.fail(f"{value!r} is not NAME=FILE.npy, such as image=photo.npy", param, ctx)
        return name, Path(file)


class Constant(click.ParamType):
    """The type of ``--constant``, split at the first equals sign."""

    name = "NAME=VALUE"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path | np.ndarray]:
        """The name and the numbers, or the file that has them, which is read later."""
        name, _, given = value.partition("=")
        if not name or not given:
            self.fail(f"{value!r} is not NAME=VALUE, such as rate=16000 or mask=mask.npy", param, ctx)
        return name, Path(given) if given.endswith(".npy") else _read(read_numbers, given, param, ctx)


def read_arrays(given: Iterable[tuple[str, Path | np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of ``NAME=FILE.npy`` and ``NAME=VALUE`` options by name, each given once."""
    arrays: dict[str, np.ndarray] = {}
    for name, array in given:
        if name in arrays:
            raise InputError(f"input {name!r} was given twice: give it once")
        arrays[name] = read_array(array) if isinstance(array, Path) else array
    return arrays


_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
"""Errors of numpy for an impossible header."""


def read_array(path: Path) -> np.ndarray:
    """The array in an .npy file; OSError if it cannot be read, InputError if it is something else."""
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
    """``array`` as bfloat16 if the tensor is: numpy writes that dtype as 2 raw bytes."""
    raw = array.dtype.kind == "V" and array.dtype.itemsize == ITEM_NBYTES[tensor.dtype]
    return array.view(numpy_dtype(tensor.dtype)) if raw else array


def file_names(names: Iterable[str]) -> dict[str, str]:
    """A file name for each tensor name: letters, digits, ``.``, ``_`` and ``-``, no two the same."""
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
