"""A PyTorch model as an ONNX file, through torch.onnx.export, for the CPU target."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nimblec.errors import CompileError, TraceError, first_line, root_cause, user_code
from nimblec.frontend import pytorch


def export(kind: str, model: str, folder: Path) -> Path:
    """Export a model to an ONNX file in ``folder``: its path.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2) or "saved" (a live module).
    Raises TraceError where torch.onnx.export refuses the model.
    """
    module, example_inputs = _load(kind, model)
    args, kwargs = pytorch.split_arguments(example_inputs)
    with user_code("the model cannot be run"), torch.no_grad():
        result = module(*args, **kwargs)
    names = [name for name, _ in pytorch.name_outputs(result)]
    path = folder / "model.onnx"
    try:
        with _quiet():
            torch.onnx.export(
                module, args, path, kwargs=kwargs, output_names=names, dynamo=True, verbose=False, external_data=True
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError, TypeError) as exc:
        name = "the module" if kind == "saved" else model
        raise TraceError(f"{name}: torch.onnx.export refuses it: {_cause(exc)}") from exc
    return path


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
