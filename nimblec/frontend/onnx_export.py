"""A PyTorch model as an ONNX file, through torch.onnx.export, for the CPU target."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nimblec.errors import CompileError, TraceError, UnsupportedModelError, first_line, root_cause, user_code
from nimblec.frontend import pytorch


def export(kind: str, model: str, folder: Path) -> Path:
    """Export a model to an ONNX file in ``folder``: its path.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2) or "saved" (a live module).
    Raises TraceError where the model cannot be run or torch.onnx.export refuses it, UnsupportedModelError
    where it has a state, which an ONNX file cannot say.
    """
    module, example_inputs = _load(kind, model)
    args, kwargs = pytorch.split_arguments(example_inputs)
    with user_code("the model cannot be run"), torch.no_grad():
        result = module(*args, **kwargs)
    names = [name for name, _ in pytorch.name_outputs(result)]
    path = folder / "model.onnx"
    name = "the module" if kind == "saved" else model
    try:
        with _quiet():
            program = torch.onnx.export(
                _as_module(module),
                args,
                path,
                kwargs=kwargs,
                output_names=names,
                dynamo=True,
                verbose=False,
                external_data=True,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError, TypeError) as exc:
        raise TraceError(f"{name}: torch.onnx.export refuses it: {_cause(exc)}") from exc
    exported = program and program.exported_program
    assert exported
    written = pytorch.state_written(exported.graph_signature)
    if written:
        raise UnsupportedModelError(
            f"{name} writes into {written[0]!r}, which an ONNX file does not keep from run to run: "
            "call .eval() first, or compile it for a GPU"
        )
    return path


def _as_module(model: Any) -> torch.nn.Module:
    """A function as a module, which is all that the exporter takes."""
    if isinstance(model, torch.nn.Module):
        return model
    module = torch.nn.Module()
    module.forward = model
    return module


def _cause(exc: BaseException) -> str:
    """What went wrong first, without colours; the exporter wraps it in advice to its own developers."""
    return re.sub(r"\x1b\[\d*m", "", first_line(root_cause(exc)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells its own developers (deprecations, packages it does without)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _load(kind: str, model: str) -> tuple[Any, Any]:
    match kind:
        case "callable":
            return pytorch.import_callable(model)
        case "exported":
            return pytorch.load_exported(Path(model))
        case "saved":
            return pytorch.load_saved(Path(model))
    raise CompileError(f"a model of kind {kind!r} is not known")
