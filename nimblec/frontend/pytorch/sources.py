"""PyTorch models as users give them: "package.module:callable", a ``.pt2`` file, an object of this process."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from nimblec.errors import ArgumentError, CompileError, user_code
from nimblec.frontend.pytorch import dynamic_shapes
from nimblec.frontend.pytorch.exported_program import load_exported
from nimblec.frontend.pytorch.model import ModelCall, bind
from nimblec.frontend.pytorch.objects import is_exported, positional
from nimblec.options import Options
from nimblec.source import Source


def load(source: Source, options: Options, *, device: str = "cpu") -> ModelCall:
    """A source that is no ONNX file, ready to be called on inputs of the sizes asked for.

    ``device`` is where it will be placed: the graph of a ``.pt2`` file names the one that it makes tensors on.

    Raises CompileError where ``inputs``, ``dims`` or ``examples`` do not fit the model, or leave a size
    open, TraceError for what the user's own code raises.
    """
    if source.kind == "callable":
        return _call(source.model, *import_callable(source.model), options)
    if source.kind == "exported":
        program = load_exported(Path(source.model))
        if device != "cpu":
            program = move_to_device_pass(program, device)
        return dynamic_shapes.specialise(source.model, program, None, options)
    live = source.live
    assert live is not None, source.kind
    if is_exported(live.model):
        given = None if live.args is None else (live.args, live.kwargs)
        return dynamic_shapes.specialise("the ExportedProgram", live.model, given, options)
    name = "the module" if isinstance(live.model, torch.nn.Module) else "the function"
    return _call(name, live.model, live.args or (), live.kwargs, options)


def _call(name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options) -> ModelCall:
    if options.dims:
        raise CompileError(
            f"--dim {options.dims[0][0]}: only an ONNX model and a dynamic ExportedProgram have named dimensions; "
            "use --input NAME:SHAPE"
        )
    return bind(module, args, kwargs, name=name, specs=options.inputs, examples=dict(options.examples))


def import_callable(spec: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the callable named "package.module:callable" returns: module, args, kwargs.

    It returns (module, example_inputs) or (module, example_inputs, kwargs), as `nimblec.compile` takes them.
    """
    module_name, _, name = spec.partition(":")
    with user_code(f"{spec}: {module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    builder = getattr(module, name, None)
    if not callable(builder):
        raise CompileError(f"{spec}: {module_name} has no callable {name!r}")
    with user_code(f"{spec}: cannot be called"):
        built = builder()
    match built:
        case (model, example_inputs) if callable(model):
            kwargs: Any = {}
        case (model, example_inputs, dict() as kwargs) if callable(model):
            pass
        case _:
            raise CompileError(
                f"{spec}: returned {type(built).__name__}, expected (module, example_inputs) or "
                "(module, example_inputs, kwargs)"
            )
    try:
        return model, positional(example_inputs), kwargs
    except ArgumentError as exc:
        raise CompileError(f"{spec}: {exc}") from exc
