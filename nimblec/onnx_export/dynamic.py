"""An ExportedProgram with dynamic dimensions as an ONNX file whose dimensions have their names."""

from pathlib import Path

import onnx
import torch

from nimblec.base.options import Options
from nimblec.onnx_export.export import ExportedModel, accuracy, examples_of
from nimblec.onnx_export.exporting import exporting_onnx
from nimblec.onnx_export.translations import COMMON
from nimblec.onnx_export.weights import kept_weights, name_ends, optimize_around_weights
from nimblec.pytorch.model import place_call
from nimblec.pytorch.outputs import name_outputs
from nimblec.pytorch.repeatable import run_twice
from nimblec.pytorch.sources import DynamicProgram
from nimblert.plan.dimensions import profile_text


def export(dynamic: DynamicProgram, options: Options, folder: Path) -> ExportedModel:
    """Export a model whose runs write no state to an ONNX file in ``folder``.

    Raises as `nimblec.onnx_export.export.export` does.
    """
    profile, call = next(iter(dynamic.calls(options).items()))
    model = place_call(call, device="cpu")
    at = f"{dynamic.name} at {profile_text(profile)}"
    outputs = name_outputs(run_twice(at, model))
    path = folder / "model.onnx"
    with exporting_onnx(dynamic.name):
        program = torch.onnx.export(
            dynamic.program,
            dynamo=True,
            verbose=False,
            custom_translation_table=COMMON,
            optimize=not options.refittable,
        )
        assert program is not None
        if options.refittable:
            optimize_around_weights(program)
        name_ends(program, [name for name, _ in model.inputs], [name for name, _ in outputs])
        program.save(path, external_data=True)
    _name_dimensions(path, dynamic)
    notes = accuracy(dynamic.name, program, model, outputs, max_error=options.max_error)
    weights = frozenset(kept_weights(program))
    return ExportedModel(
        path=path,
        state=(),
        weights=weights,
        notes=(*call.notes, *notes),
        is_dynamic=True,
        **examples_of(model.inputs),
    )


def _name_dimensions(path: Path, dynamic: DynamicProgram) -> None:
    """Give the dimensions in a file the user's names."""
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in dynamic.labels:
                dim.dim_param = dynamic.labels[dim.dim_param]
    onnx.save(model, path)
