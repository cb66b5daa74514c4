"""PyTorch models whose sizes depend on values, for the CUDA target."""

from dataclasses import replace
from pathlib import Path

from nimblec.base.errors import UnsupportedModelError
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.onnx_export.export import export
from nimblec.pytorch.model import ModelCall


def as_onnx(call: ModelCall, options: Options, folder: Path) -> tuple[Source, Options, tuple[str, ...]]:
    """Return a model as an ONNX file in ``folder``, whose import bounds such sizes; the options that remain, and notes.

    Raises UnsupportedModelError for a model that writes state, and as `nimblec.onnx_export.export.export` does.
    """
    exported = export({"main": call}, folder, refittable=options.refittable, max_error=options.max_error)["main"]
    if exported.state:
        raise UnsupportedModelError(
            f"{call.name}: sizes in it depend on values, and a run writes {exported.state[0].name!r}, which no CUDA "
            "plan has together: compile for --target cpu"
        )
    options = replace(options, inputs=(), dims=(), examples=tuple(exported.examples.items()))
    return Source(kind="onnx", model=str(exported.path)), options, exported.notes
