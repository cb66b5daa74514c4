"""ONNX Runtime's own optimiser, run ahead of time: fusions, folded constants, blocked convolutions.

The level is the one that a plain `InferenceSession(model)` uses, so that results are equal bit for
bit. Its last step lays convolutions out in blocks (NCHWc) of this machine's vector width; weights
come out reordered, and the runtime refuses them on a machine with other blocks.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from nimblec.cpu.constants import dense_of, read_arrays
from nimblec.errors import UnsupportedModelError
from nimblert.onnx_session import NO_PACKED_COPIES, onnxruntime, runtime_errors, session_options

_WEIGHTS = "weights.bin"
_EMBEDDED_NBYTES = 1024
"""Initializers below this stay in the model's protobuf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedModel:
    """A model as ONNX Runtime would run it. ``arrays`` are its constants by name; ``proto`` lacks large data."""

    proto: ModelProto
    arrays: Mapping[str, np.ndarray]


def optimize(model: ModelProto, folder: Path, scratch_folder: Path | None = None) -> OptimizedModel:
    """``model``, with static input shapes, as ONNX Runtime would run it.

    ``folder`` is where the model's external data are, if it has any. ``scratch_folder`` has room
    for a copy of the weights, which lives as long as the arrays of the result.
    """
    ort = onnxruntime()
    with tempfile.TemporaryDirectory(prefix="nimblec-", dir=scratch_folder) as scratch:
        path = Path(scratch, "model.onnx")
        options = session_options()
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry(*NO_PACKED_COPIES)
        read_external_data_from(folder, options)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _WEIGHTS)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(_EMBEDDED_NBYTES)
        )
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except runtime_errors() as exc:
            raise UnsupportedModelError(f"ONNX Runtime {ort.__version__} refuses the model: {exc}") from exc
        optimized = onnx.load(path, load_external_data=False)
        dense = [dense_of(sparse) for sparse in optimized.graph.sparse_initializer]
        optimized.graph.initializer.extend(dense)
        del optimized.graph.sparse_initializer[:]
        return OptimizedModel(proto=optimized, arrays=read_arrays(optimized, Path(scratch)))


def read_external_data_from(folder: Path, options: Any) -> None:
    """Let a session that is opened on bytes find its external data in ``folder``."""
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
