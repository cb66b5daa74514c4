"""ONNX Runtime's own optimiser, run ahead of time: fusions, folded constants, blocked convolutions.

The level is the one that a plain `InferenceSession(model)` uses, so that results are equal bit for
bit. Its last step lays convolutions out in blocks (NCHWc) of this machine's vector width; weights
come out reordered, and the runtime refuses them on a machine with other blocks.
"""

import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, TensorProto

from nimblec.cpu.constants import dense_of
from nimblec.errors import UnsupportedModelError
from nimblert.onnx_session import onnxruntime, runtime_errors, session_options

_WEIGHTS = "weights.bin"
_EMBEDDED_NBYTES = 1024
"""Initializers below this stay in the model's protobuf."""


def optimize(model: ModelProto, folder: Path) -> ModelProto:
    """``model``, with static input shapes, as ONNX Runtime would run it; all data in the result.

    ``folder`` is where the model's external data are, if it has any.
    """
    ort = onnxruntime()
    with tempfile.TemporaryDirectory(prefix="nimblec-") as scratch:
        path = Path(scratch, "model.onnx")
        options = session_options()
        options.optimized_model_filepath = str(path)
        read_external_data_from(folder, options)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(_EMBEDDED_NBYTES)
        )
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except runtime_errors() as exc:
            raise UnsupportedModelError(f"ONNX Runtime {ort.__version__} refuses the model: {exc}") from exc
        optimized = onnx.load(path)
    dense = [dense_of(sparse) for sparse in optimized.graph.sparse_initializer]
    optimized.graph.initializer.extend(dense)
    del optimized.graph.sparse_initializer[:]
    return optimized


def read_external_data_from(folder: Path, options: Any) -> None:
    """Let a session that is opened on bytes find its external data in ``folder``."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))


def initializers(model: ModelProto) -> dict[str, TensorProto]:
    """The constants of the main graph by name."""
    return {tensor.name: tensor for tensor in model.graph.initializer}
