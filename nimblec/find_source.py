"""Find what a user calls a model: a file, a name, or an object of the calling process."""

import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened
from types import FunctionType
from typing import Any

from nimblec.base.errors import ArgumentError, CompileError, UnsupportedModelError, user_code
from nimblec.base.source import LiveModel, Source, read_entries

TAKES = (
    "a torch.nn.Module or a function with its example inputs, a torch.export.ExportedProgram, an onnx.ModelProto or "
    "its bytes, the path of an .onnx or .pt2 file, package.module:callable, or a dict of entries"
)


def find_source(model: Any, example_inputs: Any, kwargs: Any, folder: Path, dynamic_shapes: Any = None) -> Source:
    """Return the source of ``model``; an ONNX model in memory is written to ``folder``.

    Raises ArgumentError for objects that are not models and for invalid example inputs, CompileError
    for a missing file.
    """
    is_bare = example_inputs is None and kwargs is None and dynamic_shapes is None
    if is_bare and (entries := _entries(model)) is not None:
        found = read_entries("the model", entries)
        return Source(
            kind="entries",
            entries=tuple((name, Source(kind="live", live=_live(*call))) for name, call in found.items()),
        )
    if not isinstance(dynamic_shapes, Mapping | tuple | list | None):
        raise ArgumentError(
            f"dynamic_shapes: {shortened(dynamic_shapes)}, expected a dict or a list, as torch.export.export takes them"
        )
    if callable(model):
        return Source(kind="live", live=replace(_live(model, example_inputs, kwargs), dynamic_shapes=dynamic_shapes))
    if dynamic_shapes is not None:
        raise ArgumentError("dynamic_shapes: only a module or a function takes them, with its example inputs")
    if example_inputs is not None or kwargs is not None:
        raise ArgumentError("example_inputs: only a module, a function or an ExportedProgram takes them")
    if isinstance(model, str | os.PathLike):
        return _find_named(os.fspath(model))
    onnx = sys.modules.get("onnx")  # already imported if the caller holds a model of it
    if isinstance(model, bytes | bytearray | memoryview) or (onnx and isinstance(model, onnx.ModelProto)):
        from nimblec.onnx_import.memory import write

        return Source(kind="onnx", model=str(write(model, folder)))
    raise ArgumentError(f"the model is of type {type(model).__name__}: expected {TAKES}")


def _entries(model: Any) -> Mapping[Any, Any] | None:
    """Return the entries that a user gives as a dict, or as a function without parameters that returns one."""
    if isinstance(model, FunctionType) and not inspect.signature(model).parameters:
        with user_code(f"{model.__name__}: cannot be called"):
            model = model()
    return model if isinstance(model, Mapping) else None


def _find_named(name: str | bytes) -> Source:
    if not isinstance(name, str) or not name or "\0" in name:
        raise CompileError(f"{name!r}: no such file")
    suffix = Path(name).suffix.lower()
    if suffix in (".onnx", ".pt2"):
        if not Path(name).is_file():
            raise CompileError(f"{name}: {'is not a regular file' if Path(name).exists() else 'no such file'}")
        return Source(kind="onnx" if suffix == ".onnx" else "exported", model=str(Path(name).resolve()))
    module, colon, attribute = name.partition(":")
    if colon and not module.endswith(".py") and all(part.isidentifier() for part in (*module.split("."), attribute)):
        return Source(kind="callable", model=name)
    if colon and module.endswith(".py"):
        raise CompileError(f"{name}: a module is given by its import name: {_importable(module, attribute)}")
    if Path(name).exists():
        raise UnsupportedModelError(
            f"{name}: expected an .onnx file, a .pt2 file of torch.export.save, or package.module:callable"
        )
    raise CompileError(f"{name}: no such file, and not of the form package.module:callable")


def _importable(file: str, attribute: str) -> str:
    """Return advice on how to name a callable in a file."""
    path = Path(os.path.relpath(file)).with_suffix("")
    if path.parts[0] == os.pardir:
        return f"run in {path.resolve().parent} and use {path.name}:{attribute}"
    if not all(part.isidentifier() for part in path.parts):
        return "rename the file or its folder, which cannot be imported"
    return f"use {'.'.join(path.parts)}:{attribute}"


def _live(model: Any, example_inputs: Any, kwargs: Any) -> LiveModel:
    """Return a callable that can be exported, with its arguments checked as far as possible without a run."""
    if isinstance(model, type):
        raise ArgumentError(f"the model is the class {model.__name__}: expected an instance of it")
    from nimblec.pytorch import objects  # imports torch, which the caller's model needs anyway

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
