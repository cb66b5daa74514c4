"""Read the weights of a model, and replace them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from nimblec.cpu.constants import read_arrays
from nimblec.onnx_import.model_nodes import weight_names

_EXTERNAL_NBYTES = 1024
_ALIGNMENT = 4096
_FILE = "weights.bin"


def weights_of(model: ModelProto, folder: Path) -> dict[str, np.ndarray]:
    """Return the weights of a model, by name."""
    names = weight_names(model)
    return {name: array for name, array in read_arrays(model, folder).items() if name in names}


def with_weights(model: ModelProto, folder: Path, weights: Mapping[str, np.ndarray], scratch: Path) -> ModelProto:
    """Return the model with these weights, the large ones in a file in ``scratch``; read others from ``folder``."""
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
