"""Load PyTorch models as users give them: "package.module:callable", a ``.pt2`` file, an object of this process."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from nimblec.base.errors import ArgumentError, CompileError, user_code
from nimblec.base.options import Options
from nimblec.base.source import Source, read_entries
from nimblec.pytorch import dynamic_shapes
from nimblec.pytorch.exported_program import load_exported
from nimblec.pytorch.model import ModelCall, bind
from nimblec.pytorch.objects import is_exported, positional
from nimblec.pytorch.recurrent import any_steps
from nimblec.pytorch.state import written_by
from nimblert.plan import Profile


def load(source: Source, options: Options, *, device: str = "cpu") -> dict[str, ModelCall]:
    """Load the entries of a source other than an ONNX file, each ready to be called on inputs of the requested sizes.

    A single entry is called "main" unless the source names it. ``device`` is where it will run: the graph
    of a ``.pt2`` file names the device of tensors it creates.

    Raises CompileError if ``inputs``, ``dims`` or ``examples`` do not fit the model or leave a size open,
    TraceError for what the user's own code raises.
    """
    if source.kind == "callable":
        calls = import_entries(source.model)
        if list(calls) == ["main"]:
            return {"main": _call(source.model, *calls["main"], options)}
        _refuse_sizes(source.model, options)
        return {name: _call(f"entry {name!r} of {source.model}", *call, options) for name, call in calls.items()}
    if source.kind == "entries":
        _refuse_sizes("the model", options)
        return {name: _load_one(part, options, device, f"entry {name!r}") for name, part in source.entries}
    return {"main": _load_one(source, options, device)}


@dataclass(frozen=True, slots=True)
class DynamicProgram:
    """An ExportedProgram, its name in error messages, and the user's names for its symbols.

    ``module`` is as in `LiveModel`.
    """

    name: str
    program: ExportedProgram
    labels: Mapping[str, str]
    module: Any = None

    @property
    def writes_state(self) -> bool:
        """Whether a run changes buffers or parameters."""
        with any_steps():
            return bool(written_by(self.name, self.program))

    def calls(self, options: Options) -> dict[Profile, ModelCall]:
        """Return the model on inputs of each profile's sizes, over the same weights."""
        module = self.module or self.program.module(check_guards=False)
        return {
            profile: dynamic_shapes.specialise(
                self.name, self.program, None, options, labels=self.labels, profile=profile, module=module
            )
            for profile in options.profiles
        }


def dynamic_program(source: Source, options: Options, *, device: str = "cpu") -> DynamicProgram:
    """Return the program of a source for several sizes. Raises CompileError for one whose dimensions have no names."""
    if source.kind == "exported":
        return DynamicProgram(source.model, _load_file(source, device), dict(source.labels))
    live = source.live
    if live is None or not is_exported(live.model) or live.args is not None:
        raise _no_names(options)
    name = _EXPORTED if live.module is None else "the module"
    return DynamicProgram(name, live.model, dict(source.labels), live.module)


_EXPORTED = "the ExportedProgram"


def _load_file(source: Source, device: str) -> ExportedProgram:
    program = load_exported(Path(source.model))
    return program if device == "cpu" else move_to_device_pass(program, f"{device}:0")


def _no_names(options: Options) -> CompileError:
    name, _ = (*options.dims, *options.sizes)[0]
    return CompileError(
        f"--dim {name}: only an ONNX model and a dynamic ExportedProgram have named dimensions; use --input "
        "NAME:SHAPE, or in Python dynamic_shapes"
    )


def _load_one(source: Source, options: Options, device: str, name: str = "") -> ModelCall:
    """Load a file or an object of this process; ``name`` is that of the latter in error messages."""
    labels = dict(source.labels)
    if source.kind == "exported":
        return dynamic_shapes.specialise(source.model, _load_file(source, device), None, options, labels=labels)
    live = source.live
    assert live is not None, source.kind
    if is_exported(live.model):
        given = None if live.args is None else (live.args, live.kwargs)
        return dynamic_shapes.specialise(
            name or _EXPORTED, live.model, given, options, labels=labels, module=live.module
        )
    name = name or ("the module" if isinstance(live.model, torch.nn.Module) else "the function")
    return _call(name, live.model, live.args or (), live.kwargs, options)


def _refuse_sizes(name: str, options: Options) -> None:
    """Raise CompileError for sizes and examples, which would apply to several entries."""
    if options.inputs or options.dims or options.sizes or options.examples:
        raise CompileError(f"{name} has several entries, which take sizes from their example inputs: give no others")


def _call(name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> ModelCall:
    if options.dims or options.sizes:
        raise _no_names(options)
    return bind(module, args, kwargs, name=name, specs=options.inputs, examples=dict(options.examples))


ModuleCall: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A module, and the positional and keyword arguments of one call."""


def import_entries(spec: str) -> dict[str, ModuleCall]:
    """Return the result of the callable named "package.module:callable": module, args, kwargs of each entry.

    It returns (module, example_inputs) or (module, example_inputs, kwargs), as `nimblec.compile` takes
    them, for an entry "main", or a dict of such by the names of entries.
    """
    module_name, _, name = spec.partition(":")
    with user_code(f"{spec}: {module_name} cannot be imported", SystemExit):
        module = importlib.import_module(module_name)
    builder = getattr(module, name, None)
    if not callable(builder):
        raise CompileError(f"{spec}: {module_name} has no callable {name!r}")
    with user_code(f"{spec}: cannot be called", SystemExit):
        built = builder()
    try:
        found = read_entries(spec, built) if isinstance(built, Mapping) else {"main": _model_and_inputs(built)}
        return {entry: (model, positional(inputs), kwargs or {}) for entry, (model, inputs, kwargs) in found.items()}
    except ArgumentError as exc:
        raise CompileError(str(exc) if str(exc).startswith(spec) else f"{spec}: {exc}") from exc


def _model_and_inputs(built: Any) -> tuple[Any, Any, dict[str, Any]]:
    match built:
        case (model, example_inputs) if callable(model):
            return model, example_inputs, {}
        case (model, example_inputs, dict() as kwargs) if callable(model):
            return model, example_inputs, kwargs
    raise ArgumentError(
        f"returned {type(built).__name__}, expected (module, example_inputs), (module, example_inputs, kwargs), or a "
        "dict of them by entry"
    )
