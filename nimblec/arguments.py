"""The command line's own notations: NAME:SHAPE[:DTYPE], NAME=SIZE, NAME=FILE.npy, safe file names."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tokenize import TokenError

import click
import numpy as np

from nimblec.options import InputSpec
from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.replacing import replacing

_SIZE = r"[0-9]{1,18}"  # more digits are no size of anything, and Python refuses to read thousands
_SHAPE = re.compile(rf"{_SIZE}(x{_SIZE})*|scalar|")
_LONGEST_SHOWN = 80


def _shown(text: str) -> str:
    """What was given, as a message shows it."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]!r}..."


def parse_spec(text: str) -> InputSpec:
    """``NAME:SHAPE[:DTYPE]``, read from the right, since a name may contain colons.

    SHAPE is ``1x3x224x224``, ``16``, or ``scalar`` (or nothing) for a tensor without dimensions.
    """
    fields = text.split(":")
    dtype = fields.pop() if len(fields) > 2 and fields[-1] in ITEM_NBYTES else None
    shape = fields.pop()
    name = ":".join(fields)
    if not name or not _SHAPE.fullmatch(shape):
        raise click.BadParameter(
            f"{_shown(text)} is not NAME:SHAPE[:DTYPE], such as image:1x3x224x224 or ids:1x16:int64 "
            f"(dtypes: {', '.join(ITEM_NBYTES)})"
        )
    sizes = () if shape in {"", "scalar"} else tuple(map(int, shape.split("x")))
    return InputSpec(name=name, shape=sizes, dtype=dtype)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NBYTES = re.compile(rf"(?P<number>{_SIZE}(\.[0-9]{{1,18}})?)\s*(?P<unit>|b|[kmg]i?b)", re.IGNORECASE)


class Spec(click.ParamType):
    """The type of ``compile --input``."""

    name = "NAME:SHAPE[:DTYPE]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> InputSpec:
        """Parse one value."""
        del param, ctx
        return parse_spec(value)


class Streams(click.ParamType):
    """auto, 1, max, or a number of streams."""

    name = "auto|1|max|N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The policy, as `Options.streams` takes it."""
        if value not in ("auto", "max") and not (re.fullmatch(_SIZE, value) and int(value) > 0):
            self.fail(f"{_shown(value)}: expected auto, max, or a number of streams from 1.", param, ctx)
        return value


class Nbytes(click.ParamType):
    """A number of bytes, with a unit if wanted."""

    name = "BYTES"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes; units are decimal (kB, MB, GB) or binary (KiB, MiB, GiB)."""
        found = _NBYTES.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{_shown(str(value))}: expected a number of bytes such as 1000000, 64MiB or 1.5GB.", param, ctx)
        return int(float(found["number"]) * _UNITS[found["unit"].lower()])


class NamedSize(click.ParamType):
    """The type of ``compile --dim``, split at the last equals sign: exporters name dimensions as they like."""

    name = "NAME=SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """The name and the size."""
        name, _, size = value.rpartition("=")
        if not name or not re.fullmatch(_SIZE, size):
            self.fail(f"{_shown(value)} is not NAME=SIZE, such as batch=4", param, ctx)
        return name, int(size)


class NamedFile(click.ParamType):
    """The type of ``NAME=FILE.npy``, split at the first equals sign."""

    name = "NAME=FILE.npy"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Split one value; the file is read later."""
        name, _, file = value.partition("=")
        if not name or not file:
            self.fail(f"{value!r} is not NAME=FILE.npy, such as image=photo.npy", param, ctx)
        return name, Path(file)


def read_arrays(files: Iterable[tuple[str, Path]]) -> dict[str, np.ndarray]:
    """The arrays of ``NAME=FILE.npy`` options by name, each given once."""
    arrays: dict[str, np.ndarray] = {}
    for name, path in files:
        if name in arrays:
            raise InputError(f"input {name!r} was given twice: give it once")
        arrays[name] = read_array(path)
    return arrays


_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError, RecursionError)
"""What numpy makes of a header that says something impossible."""


def read_array(path: Path) -> np.ndarray:
    """The one array of an .npy file; OSError where it cannot be read, InputError where it is none."""
    if path.exists() and not path.is_file():  # a pipe may be read forever
        raise InputError(f"{path}: is no regular file, expected an .npy file")
    try:
        array = np.load(path, allow_pickle=False)
    except _DAMAGED as exc:
        raise InputError(f"{path}: not an .npy file, or a damaged one: write it with numpy.save") from exc
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: an .npz archive, expected one array: write it with numpy.save")
    return array


def restore_dtype(array: np.ndarray, tensor: Tensor) -> np.ndarray:
    """``array`` as bfloat16 where an .npy file has lost that: numpy writes it as 2 raw bytes."""
    raw = array.dtype.kind == "V" and array.dtype.itemsize == ITEM_NBYTES[tensor.dtype]
    return array.view(numpy_dtype(tensor.dtype)) if raw else array


def file_names(names: Iterable[str]) -> dict[str, str]:
    """A file name for each tensor name: letters, digits, ``.``, ``_`` and ``-``, no two the same."""
    taken: set[str] = set()
    chosen: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:100] or "output"
        candidate, count = stem, 1
        while candidate.lower() in taken:  # some file systems do not tell A from a
            count += 1
            candidate = f"{stem}_{count}"
        taken.add(candidate.lower())
        chosen[name] = f"{candidate}.npy"
    return chosen


def write_arrays(directory: Path, arrays: Mapping[str, np.ndarray]) -> tuple[Path, ...]:
    """Write each array as NAME.npy: to a temporary name first, so that no old file is half replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = tuple(directory / file for file in file_names(arrays).values())
    for path, array in zip(paths, arrays.values(), strict=True):
        with replacing(path) as file:
            np.save(file, array, allow_pickle=False)
    return paths
