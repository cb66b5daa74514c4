"""Where a model comes from: a file, the name of a callable, or an object of the calling process."""

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from types import FunctionType
from typing import Any

from nimblec.errors import ArgumentError, CompileError, UnsupportedModelError, user_code

TAKES = (
    "a torch.nn.Module or a function with its example inputs, a torch.export.ExportedProgram, an onnx.ModelProto or "
    "its bytes, the path of an .onnx or .pt2 file, package.module:callable, or a dict of entries"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A module, a function or an ExportedProgram of this process, and the arguments of one call.

    ``args`` is None where none were given: an ExportedProgram has its own.
    """

    model: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model is; it is not loaded yet.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2), "onnx", of which ``model`` is
    the name or path, "live", which is ``live``, or "entries", a source for each entry by its name.
    What a callable returns may be several entries, too.
    """

    kind: str
    model: str = ""
    live: LiveModel | None = None
    entries: "tuple[tuple[str, Source], ...]" = ()


def find_source(model: Any, example_inputs: Any, kwargs: Any, folder: Path) -> Source:
    """The source of ``model``; an ONNX model in memory is written to ``folder``.

    Raises ArgumentError for objects that are not models and for invalid example inputs, CompileError
    for a missing file.
    """
    if example_inputs is None and kwargs is None and (entries := _entries(model)) is not None:
        found = read_entries("the model", entries)
        return Source(
            kind="entries",
            entries=tuple((name, Source(kind="live", live=_live(*call))) for name, call in found.items()),
        )
    if callable(model):
        return Source(kind="live", live=_live(model, example_inputs, kwargs))
    if example_inputs is not None or kwargs is not None:
        raise ArgumentError("example_inputs: only a module, a function or an ExportedProgram takes them")
    if isinstance(model, str | os.PathLike):
        return _find_named(os.fspath(model))
    onnx = sys.modules.get("onnx")  # already imported if the caller holds a model of it
    if isinstance(model, bytes | bytearray | memoryview) or (onnx and isinstance(model, onnx.ModelProto)):
        from nimblec.frontend.onnx.memory import write

        return Source(kind="onnx", model=str(write(model, folder)))
    raise ArgumentError(f"the model is of type {type(model).__name__}: expected {TAKES}")


def _entries(model: Any) -> Mapping[Any, Any] | None:
    """The entries that a user gives as a dict, or as a function that takes nothing and returns one."""
    if isinstance(model, FunctionType) and not inspect.signature(model).parameters:
        with user_code(f"{model.__name__}: cannot be called"):
            model = model()
    return model if isinstance(model, Mapping) else None


def read_entries(what: str, entries: Mapping[Any, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """The model, example inputs and keyword arguments of each entry by its name; ArgumentError for what is none."""
    if not entries:
        raise ArgumentError(f"{what}: has no entries")
    found: dict[str, tuple[Any, Any, Any]] = {}
    for name, call in entries.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ArgumentError(f"{what}: {shortened(name)} is no name of an entry: expected a string")
        match call:
            case (module, example_inputs) if callable(module):
                found[name] = module, example_inputs, None
            case (module, example_inputs, dict() as kwargs) if callable(module):
                found[name] = module, example_inputs, kwargs
            case _:
                raise ArgumentError(
                    f"{what}: entry {name!r} is {type(call).__name__}, expected (module, example_inputs) or "
                    "(module, example_inputs, kwargs)"
                )
    return found


def _find_named(name: str | bytes) -> Source:
    if not isinstance(name, str) or "\0" in name:
        raise CompileError(f"{name!r}: no such file")
    suffix = Path(name).suffix.lower()
    if suffix in (".onnx", ".pt2"):
        if not Path(name).is_file():
            raise CompileError(f"{name}: no such file")
        return Source(kind="onnx" if suffix == ".onnx" else "exported", model=str(Path(name).resolve()))
    module, colon, attribute = name.partition(":")
    if colon and not module.endswith(".py") and all(part.isidentifier() for part in (*module.split("."), attribute)):
        return Source(kind="callable", model=name)
    if colon and module.endswith(".py"):
        raise CompileError(f"{name}: a module is named as import names it: use {_importable(module)}:{attribute}")
    if Path(name).exists():
        raise UnsupportedModelError(f"{name}: expected an .onnx or .pt2 file, or package.module:callable")
    raise CompileError(f"{name}: no such file, and not of the form package.module:callable")


def _importable(file: str) -> str:
    """The module name of a file below the current folder."""
    return ".".join(Path(file).with_suffix("").parts)


def _live(model: Any, example_inputs: Any, kwargs: Any) -> LiveModel:
    """A callable that can be exported, with its arguments checked as far as possible without a run."""
    if isinstance(model, type):
        raise ArgumentError(f"the model is the class {model.__name__}: expected an instance of it")
    from nimblec.frontend.pytorch import objects  # imports torch, which the caller's model needs anyway

    objects.refuse_script(model)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ArgumentError(f"kwargs: got {type(kwargs).__name__}, expected a dict of keyword arguments by name")
    args = None if example_inputs is None else objects.positional(example_inputs)
    if args is None and not kwargs and not objects.is_exported(model):
        raise ArgumentError(
            "example_inputs: a module or a function needs the arguments of one call: compile(module, (x,)), or "
            "compile(module, kwargs={'x': x})"
        )
    return LiveModel(model=model, args=args if args is not None or not kwargs else (), kwargs=dict(kwargs or {}))
