"""Files of weights and of state: safetensors, read and written by the package of that name."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nimblert.arrays.dtypes import numpy_dtype
from nimblert.errors import InputError

_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""The dtypes that both safetensors files and plans have, by their names in the files."""


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
        self.outline(key)  # refuses what no plan has
        found: np.ndarray = self._file.get_tensor(key)
        return found

    def outline(self, key: str) -> np.ndarray:
        """An array of the same dtype and shape, for checks: its contents are not read. Raises InputError, KeyError."""
        if key not in self._keys:
            raise KeyError(key)
        described = self._file.get_slice(key)
        dtype = described.get_dtype()
        if dtype not in _DTYPES:
            raise InputError(f"{self._name}: {key!r} has dtype {dtype}, which no plan has: convert it")
        try:
            return np.broadcast_to(np.zeros((), numpy_dtype(_DTYPES[dtype])), described.get_shape())
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
