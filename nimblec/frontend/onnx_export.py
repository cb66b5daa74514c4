"""A PyTorch model as an ONNX file, through torch.onnx.export, for the CPU target."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nimblec.errors import CompileError, TraceError, UnsupportedModelError, user_code
from nimblec.frontend import exported_program, pytorch
from nimblec.frontend.repeatable import compared, refuse_differing
from nimblec.frontend.torch_log import quiet_torch
from nimblert.onnx_session import onnxruntime, runtime_errors, session_options

_NOT_KEPT = "which an ONNX file does not keep from run to run: call .eval() first, or compile it for a GPU"
_ANOTHER_MODEL = 0.1
"""Of the largest magnitude: no rounding explains that."""


def export(kind: str, model: str, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Export a model to an ONNX file in ``folder``: its path, and what the user should know.

    ``kind``: "callable" ("package.module:callable"), "exported" (.pt2) or "saved" (a live module).
    Raises TraceError where the model cannot be run or torch.onnx.export refuses it, UnsupportedModelError
    where its runs differ, CompileError where ONNX Runtime computes something else than PyTorch.
    """
    module, example_inputs = _load(kind, model)
    args, kwargs = pytorch.split_arguments(example_inputs)
    name = "the module" if kind == "saved" else model
    outputs = _run_twice(name, module, args, kwargs)
    path = folder / "model.onnx"
    try:
        with quiet_torch():
            program = torch.onnx.export(
                _as_module(module),
                args,
                path,
                kwargs=kwargs,
                output_names=[output for output, _ in outputs],
                dynamo=True,
                verbose=False,
                external_data=True,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError, TypeError) as exc:
        raise TraceError(f"{name}: torch.onnx.export refuses it: {_cause(exc)}") from exc
    assert program is not None
    assert program.exported_program is not None
    written = pytorch.state_written(program.exported_program.graph_signature)
    if written:
        raise UnsupportedModelError(f"{name} writes into {written[0]!r}, {_NOT_KEPT}")
    try:
        program.initialize_inference_session(_session)
        found = program(*args, **kwargs)
    except runtime_errors():  # will be told of the node that it does not run
        return path, ()
    return path, (_accuracy(name, outputs, found),)


def _run_twice(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The outputs by name, which are the same in both runs."""

    def run() -> list[tuple[str, torch.Tensor]]:
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with user_code("the model cannot be run"), torch.no_grad():
            result = module(*own_args, **own_kwargs)
        return pytorch.name_outputs(pytree.tree_map_only(torch.Tensor, torch.clone, result))

    first = run()
    refuse_differing(name, first, run(), _NOT_KEPT)
    return first


def _accuracy(name: str, outputs: Sequence[tuple[str, torch.Tensor]], found: Sequence[torch.Tensor]) -> str:
    """How far ONNX Runtime's outputs are from PyTorch's."""
    largest = 0.0
    for (output, wanted), got in zip(outputs, found, strict=True):
        relative = compared(wanted, got).relative
        if wanted.is_floating_point() and relative > _ANOTHER_MODEL:
            raise CompileError(
                f"{name}: output {output!r} of the ONNX file that torch.onnx.export made differs from what PyTorch "
                f"computes by {relative:.2g} of its largest magnitude"
            )
        largest = max(largest, relative)
    return f"ONNX Runtime differs from PyTorch by at most {largest:.2g} of the largest magnitude of an output"


def _session(model: str | bytes) -> Any:
    return onnxruntime().InferenceSession(model, session_options(), providers=["CPUExecutionProvider"])


def _as_module(model: Any) -> torch.nn.Module:
    """A function as a module, which is all that the exporter takes."""
    if isinstance(model, torch.nn.Module):
        return model
    module = torch.nn.Module()
    module.forward = model
    return module


def _cause(exc: BaseException) -> str:
    """What went wrong first, without colours; the exporter wraps it in advice to its own developers."""
    return re.sub(r"\x1b\[\d*m", "", pytorch.export_refusal(exc))


def _load(kind: str, model: str) -> tuple[Any, Any]:
    match kind:
        case "callable":
            return pytorch.import_callable(model)
        case "exported":
            return exported_program.load_exported(Path(model))
        case "saved":
            return pytorch.load_saved(Path(model))
    raise CompileError(f"a model of kind {kind!r} is not known")
