"""A model with other weights, near its own and all different: what is optimised then holds for any weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from nimblec.cpu.constants import read_arrays
from nimblec.frontend.onnx import model_nodes

_DTYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16})

_SIZING = frozenset({"Resize", "Upsample", "Range", "OneHot", "Dropout", "Clip", "Pad", "Pow"})
"""Operators whose constants say what is computed, and are no weights."""

_EXTERNAL_NBYTES = 1024
_ALIGNMENT = 4096
_FILE = "weights.bin"


def weights_of(model: ModelProto, folder: Path) -> dict[str, np.ndarray]:
    """The weights of a model, by name: initializers of floating-point numbers in a row or more.

    Numbers alone, such as the factor of a GELU, say what is computed: patterns are recognised by them.
    """
    settled = {name for node in model_nodes.nodes(model.graph) if node.op_type in _SIZING for name in node.input[1:]}
    names = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type in _DTYPES and tensor.dims and 0 not in tensor.dims and tensor.name not in settled
    }
    return {name: array for name, array in read_arrays(model, folder).items() if name in names}


def perturbed(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Other weights for these, by name: a little larger, so that variances stay positive, and no two the same."""
    found: dict[str, np.ndarray] = {}
    taken: set[bytes] = set()
    for name, array in weights.items():
        for attempt in range(1000):
            digits = hashlib.sha256(f"{seed} {attempt} {name}".encode()).digest()
            random = np.random.default_rng(list(digits))
            noise = random.uniform(0.05, 0.1, array.shape)
            made = (np.abs(array.astype(np.float64)) * noise + noise / 8 + array).astype(array.dtype)
            if made.tobytes() not in taken:
                break
        taken.add(made.tobytes() if made.nbytes <= _EXTERNAL_NBYTES else b"")
        found[name] = made
    return found


def with_weights(model: ModelProto, folder: Path, weights: Mapping[str, np.ndarray], scratch: Path) -> ModelProto:
    """The model with these weights, the large ones in a file in ``scratch``; ``folder`` has those of ``model``."""
    made = ModelProto()
    made.CopyFrom(model)
    arrays = {**read_arrays(made, folder), **weights}
    with (scratch / _FILE).open("wb") as file:
        for tensor in made.graph.initializer:
            array = arrays.get(tensor.name)
            if array is None:
                continue
            if array.nbytes < _EXTERNAL_NBYTES:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
                continue
            file.write(bytes(-file.tell() % _ALIGNMENT))
            stored = {"location": _FILE, "offset": str(file.tell()), "length": str(array.nbytes)}
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in stored.items():
                tensor.external_data.add(key=key, value=value)
            array.tofile(file)
    return made
