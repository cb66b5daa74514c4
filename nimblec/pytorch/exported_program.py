"""Open a ``.pt2`` file (torch.export.save) without running anything in it before it is known to be a model.

`torch.export.load` evaluates sizes as Python (through sympy), imports what types name, and may unpickle sample inputs.
So sizes must be expressions of integers and symbols, and pickles hold only tensors and plain values, before torch reads
them; that a call is an operator, torch checks itself. The model then runs with the user's rights.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2
from torch.export.pt2_archive.constants import (
    AOTINDUCTOR_DIR,
    CONSTANTS_CONFIG_FILENAME_FORMAT,
    CONSTANTS_DIR,
    MODELS_DIR,
    MODELS_FILENAME_FORMAT,
    SAMPLE_INPUTS_FILENAME_FORMAT,
    TENSOR_CONSTANT_FILENAME_PREFIX,
    WEIGHTS_CONFIG_FILENAME_FORMAT,
    WEIGHTS_DIR,
)

from nimblec.base.errors import CompileError, first_line
from nimblec.pytorch.export_errors import quiet_torch
from nimblec.pytorch.size_expression import check_expression

_NAME = "model"
"""The name that torch.export.save gives the one program of a file."""

_ENFORCED = re.compile(r"\[enforce fail[^]]*\] \. ")
"""The prefix of messages of torch's reader."""

_UNBACKED = re.compile(r"(?:u|zuf)(\d+)")
_MOST_SYMBOLS = 10**5


def load_exported(path: Path) -> torch.export.ExportedProgram:
    """Return the program in a ``.pt2`` file.

    Raises CompileError where the file is damaged, or holds what no exported model needs.
    """
    try:
        with quiet_torch(), PT2ArchiveReader(str(path)) as archive:
            _check(archive)
            program = load_pt2(str(path)).exported_programs[_NAME]
            program.module(check_guards=False)  # fails if the file is damaged; guards are code too
    except _RefusedError as exc:
        raise CompileError(f"{path}: {exc}") from exc
    except Exception as exc:  # torch has no specific error for a damaged file
        said = _ENFORCED.sub("", first_line(exc)).partition(". ")[0] or "nothing more is known"
        raise CompileError(
            f"{path}: damaged, or not written by torch.export.save of torch {torch.__version__} "
            f"({type(exc).__name__}: {said[:300]})"
        ) from exc
    return program


class _RefusedError(Exception):
    """The file holds something that would run before it is known to be a model."""


def _check(archive: PT2ArchiveReader) -> None:
    """Raise _RefusedError for what `torch.export.load` would evaluate, unpickle or load as machine code."""
    names = archive.get_file_names()
    models = [name for name in names if name.startswith(MODELS_DIR)]
    if models != [MODELS_FILENAME_FORMAT.format(_NAME)]:
        raise _RefusedError(f"holds {len(models)} programs, expected one: save one program with torch.export.save")
    if any(name.startswith(AOTINDUCTOR_DIR) for name in names):
        raise _RefusedError("holds machine code of AOTInductor, expected a model: use torch.export.save")
    for name in _pickled(archive, names):
        _check_pickle(name, archive.read_bytes(name))
    _check_program(json.loads(archive.read_string(models[0])))


def _pickled(archive: PT2ArchiveReader, names: list[str]) -> Iterator[str]:
    """Yield the records that torch unpickles."""
    yield SAMPLE_INPUTS_FILENAME_FORMAT.format(_NAME)
    for folder, config in (
        (WEIGHTS_DIR, WEIGHTS_CONFIG_FILENAME_FORMAT),
        (CONSTANTS_DIR, CONSTANTS_CONFIG_FILENAME_FORMAT),
    ):
        if (whole := f"{folder}{_NAME}.pt") in names:  # an older layout
            yield whole
            continue
        for entry in json.loads(archive.read_string(config.format(_NAME)))["config"].values():
            record = entry["path_name"]
            if folder == CONSTANTS_DIR and not record.startswith(TENSOR_CONSTANT_FILENAME_PREFIX):
                raise _RefusedError(f"holds a pickled object ({record!r}), expected tensors only")
            if entry["use_pickle"]:
                yield f"{folder}{record}"


def _check_pickle(name: str, content: bytes) -> None:
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as exc:
        # The reader may raise anything on a damaged pickle.
        raise _RefusedError(
            f"{name!r} in it is a pickle of more than tensors and plain values, which could run any code: export the "
            "model again with inputs made of those"
        ) from exc


def _check_program(program: Any) -> None:
    """Check every size, call and type in a serialised program, wherever it stands."""
    left = [program]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
            _check_fields(value)
    for symbol in program["range_constraints"]:
        found = _UNBACKED.match(symbol)
        if found and int(found[1][:10]) > _MOST_SYMBOLS:
            raise _RefusedError(f"names a symbol {symbol[:80]!r}, expected a small number in it")


def _check_fields(fields: dict[str, Any]) -> None:
    if "expr_str" in fields:
        try:
            check_expression(fields["expr_str"])
        except ValueError as exc:
            raise _RefusedError(str(exc)) from exc
    for key in ("in_spec", "out_spec"):
        if isinstance(fields.get(key), str) and _names_modules(fields[key]):
            raise _RefusedError(f"the type of its arguments or results names a module to import: {fields[key][:80]!r}")


def _names_modules(spec: str) -> bool:
    """Return whether a pytree's JSON within JSON names classes by module: enums, and defaultdict's factories."""
    left: list[Any] = [spec]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "__enum__" in value or "default_factory_module" in value:
                return True
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, str) and value[:1] in {"[", "{", '"'}:
            try:
                left.append(json.loads(value))
            except ValueError:
                continue  # a key that only looks like JSON
    return False
