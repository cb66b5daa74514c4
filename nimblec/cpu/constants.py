"""Constants of an optimised model: their types and data, and how models refer to the large ones.

A large constant stands in a model as an initializer without data, whose memory is given to the
session: no model grows beyond the 2 GiB that protobuf can hold, and weights are not copied.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import SparseTensorProto, TensorProto, numpy_helper

from nimblec.frontend import onnx_file
from nimblert.onnx_session import EXTERNAL_FILE
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
    """The type of a constant that a plan can hold."""
    dtype = onnx_file.dtype_name(tensor.data_type)
    assert dtype is not None
    return TensorType(dtype=dtype, shape=tuple(tensor.dims))


def is_embedded(tensor: TensorProto) -> bool:
    """Whether a constant becomes part of every model that reads it.

    So do shapes, axes and scalars, which shape inference reads, and what a plan has no dtype for.
    """
    dtype = onnx_file.dtype_name(tensor.data_type)
    if dtype is None:
        return True
    limit = _EMBEDDED_INTEGER_NBYTES if dtype.startswith(("int", "uint")) else _EMBEDDED_NBYTES
    return type_of(tensor).nbytes <= limit


def array_of(tensor: TensorProto) -> np.ndarray:
    """The data of a constant in C order."""
    return np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(tuple(tensor.dims))


def dense_of(sparse: SparseTensorProto) -> TensorProto:
    """A sparse constant (COO, its indices linear or by axis) as a dense one."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def external(name: str, tensor_type: TensorType) -> TensorProto:
    """An initializer whose memory is given to the session that is opened on the model."""
    tensor = TensorProto(
        name=name,
        data_type=onnx_file.element_type(tensor_type.dtype),
        dims=tensor_type.shape,
        data_location=TensorProto.EXTERNAL,
    )
    tensor.external_data.add(key="location", value=EXTERNAL_FILE)
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="length", value=str(tensor_type.nbytes))
    return tensor
