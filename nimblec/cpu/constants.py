"""Constants of an optimised model: their types and data, and how models refer to the large ones.

A large constant is an initializer without data, whose memory is given to the session: no model
exceeds the 2 GiB that protobuf can hold, and weights are not copied. Data in files are mapped, so
weights take no memory beyond ONNX Runtime's own copies.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from onnx import ModelProto, SparseTensorProto, TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from nimblec.onnx_import import model_file
from nimblec.onnx_import.external_data import external_tensors, read_tensor
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check.onnx_rules import EXTERNAL_FILE
from nimblert.plan import ITEM_NBYTES

_EMBEDDED_NBYTES = 64
_EMBEDDED_INTEGER_NBYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Dtype (a plan's name) and static shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return prod(self.shape) * ITEM_NBYTES[self.dtype]


def type_of(tensor: TensorProto) -> TensorType:
    """Return the type of a constant that a plan can hold."""
    dtype = model_file.dtype_name(tensor.data_type)
    assert dtype is not None
    return TensorType(dtype=dtype, shape=tuple(tensor.dims))


_KEPT_APART = "nimblec: a weight"
"""Metadata key of a constant that is never embedded, however small."""


def keep_apart(model: ModelProto, names: Collection[str]) -> None:
    """Mark constants of the main graph of ``model``, so that no one-node model embeds them."""
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.metadata_props.add(key=_KEPT_APART)


def is_embedded(tensor: TensorProto) -> bool:
    """Return whether a constant becomes part of every one-node model that reads it.

    True of shapes, axes and scalars, which shape inference reads, and of dtypes that plans lack.
    """
    if any(entry.key == _KEPT_APART for entry in tensor.metadata_props):
        return False
    dtype = model_file.dtype_name(tensor.data_type)
    if dtype is None:
        return True
    limit = _EMBEDDED_INTEGER_NBYTES if dtype.startswith(("int", "uint")) else _EMBEDDED_NBYTES
    return type_of(tensor).nbytes <= limit


def read_arrays(model: ModelProto, folder: Path) -> dict[str, np.ndarray]:
    """Return the data of the main graph's initializers by name, in C order, if a plan can hold their dtype.

    External data are files in ``folder``. Large constants are mapped, not read: the files may be
    deleted afterwards, but not changed. All other external data are loaded into ``model``.
    """
    large = {tensor.name for tensor in model.graph.initializer if not is_embedded(tensor)}
    for tensor in external_tensors(model):
        if tensor.name not in large:
            read_tensor(tensor, folder)
    image_of = cache(_map)
    arrays = {}
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            arrays[tensor.name] = _mapped(tensor, image_of(folder / info.location), info.offset or 0)
        elif model_file.dtype_name(tensor.data_type):
            arrays[tensor.name] = np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))
    return arrays


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _mapped(tensor: TensorProto, image: memoryview, offset: int) -> np.ndarray:
    tensor_type = type_of(tensor)
    content = np.frombuffer(image[offset : offset + tensor_type.nbytes], np.uint8)
    return content.view(numpy_dtype(tensor_type.dtype)).reshape(tensor_type.shape)


def dense_of(sparse: SparseTensorProto) -> TensorProto:
    """Return a sparse constant (COO, its indices linear or by axis) as a dense one."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def external(name: str, tensor_type: TensorType) -> TensorProto:
    """Return an initializer whose memory is given to the session that is opened on the model."""
    tensor = TensorProto(
        name=name,
        data_type=model_file.element_type(tensor_type.dtype),
        dims=tensor_type.shape,
        data_location=TensorProto.EXTERNAL,
    )
    tensor.external_data.add(key="location", value=EXTERNAL_FILE)
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="length", value=str(tensor_type.nbytes))
    return tensor
