"""A PyTorch model as an ONNX file, through torch.onnx.export, for the CPU target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nimblec.errors import CompileError, UnsupportedModelError
from nimblec.frontend.pytorch.borrowed import borrowed
from nimblec.frontend.pytorch.export_errors import exporting
from nimblec.frontend.pytorch.model import (
    ModelCall,
    TorchModel,
    as_module,
    missing_outputs,
    name_outputs,
    place_call,
    state_written,
)
from nimblec.frontend.pytorch.repeatable import compared, run_twice
from nimblert.onnx_session import onnxruntime, runtime_errors, session_options

_NOT_KEPT = "which an ONNX file does not keep: call .eval() first; plans for a GPU keep state that lies in buffers"
_ANOTHER_MODEL = 0.1
"""Relative to the largest magnitude: more than rounding explains."""


def export(call: ModelCall, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Export a model to an ONNX file in ``folder``; returns its path, and notes for the user.

    The module is not modified. Raises TraceError if the model cannot be run or torch.onnx.export refuses
    it, UnsupportedModelError if its runs differ, CompileError if ONNX Runtime's results differ from
    PyTorch's.
    """
    with borrowed(call.module):
        return _export(call.name, place_call(call, device="cpu"), folder / "model.onnx")


def _export(name: str, model: TorchModel, path: Path) -> tuple[Path, tuple[str, ...]]:
    result = run_twice(name, model, _NOT_KEPT, buffers_are_kept=False)
    outputs = name_outputs(result)
    with exporting(name, "torch.onnx.export"):
        program = torch.onnx.export(
            as_module(model.module),
            model.args if model.kwargs else (*model.args, {}),  # else it takes a trailing dict for kwargs
            path,
            kwargs=model.kwargs,
            input_names=[name for name, _ in model.inputs],
            output_names=[output for output, _ in outputs],
            dynamo=True,
            verbose=False,
            external_data=True,
        )
    assert program is not None
    assert program.exported_program is not None
    notes = (*model.notes, *missing_outputs(result))
    written = state_written(program.exported_program.graph_signature)
    if written:
        raise UnsupportedModelError(f"{name} writes into {written[0]!r}, {_NOT_KEPT}")
    try:
        program.initialize_inference_session(_session)
        found = program(*model.args, **model.kwargs)
    except runtime_errors():  # reported later, with the node that it cannot run
        return path, notes
    return path, (*notes, _accuracy(name, outputs, found))


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
