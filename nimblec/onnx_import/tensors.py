"""ONNX tensors and attributes as torch tensors and Python values."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, numpy_helper
from torch import Tensor

from nimblec.base.errors import UnsupportedModelError
from nimblec.onnx_ops.axes import sizes_of
from nimblec.onnx_ops.creation import ELEMENT_TYPES
from nimblec.onnx_ops.table import Refused

NARROW: dict[int, type[np.generic]] = {
    TensorProto.INT4: np.int8,
    TensorProto.UINT4: np.uint8,
    TensorProto.INT2: np.int8,
    TensorProto.UINT2: np.uint8,
    TensorProto.FLOAT8E4M3FN: np.float32,
    TensorProto.FLOAT8E4M3FNUZ: np.float32,
    TensorProto.FLOAT8E5M2: np.float32,
    TensorProto.FLOAT8E5M2FNUZ: np.float32,
    TensorProto.FLOAT4E2M1: np.float32,
}
"""Element types that torch lacks, and a dtype that holds all their values."""

_MARK = "narrow_type"
"""The attribute of a tensor that names the narrow type it stands for."""


def tensor_of(proto: TensorProto) -> Tensor:
    """Return the CPU tensor of an initializer, on the proto's own bytes where they allow it.

    Raises UnsupportedModelError for dtypes that torch lacks and data that do not fit the shape.
    """
    dtype = ELEMENT_TYPES.get(proto.data_type)
    if dtype is None and proto.data_type not in NARROW:
        raise UnsupportedModelError(f"tensor '{proto.name}': element type {proto.data_type} is not supported")
    try:
        array = numpy_helper.to_array(proto)
    except (ValueError, TypeError, RuntimeError, OSError) as exc:
        raise UnsupportedModelError(f"tensor '{proto.name}': its data do not fit its shape ({exc})") from exc
    if dtype is None:
        tensor = torch.from_numpy(array.astype(NARROW[proto.data_type]))
        setattr(tensor, _MARK, TensorProto.DataType.Name(proto.data_type))
        return tensor
    if dtype == torch.bfloat16:
        return _from_array(array.view(np.int16)).view(torch.bfloat16)
    return _from_array(array)


def narrow_type(value: Any) -> str | None:
    """Return the ONNX element type of a tensor that torch holds in a wider dtype, None for others.

    Such a tensor stands for weights: only DequantizeLinear may read it.
    """
    name: str | None = getattr(value, _MARK, None)
    return name


def _from_array(array: np.ndarray) -> Tensor:
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # Constants are never written to; torch warns once about memory that must not be.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def attribute_of(proto: AttributeProto) -> Any:
    """Return an attribute as a number, string, tuple, tensor or graph; refuse other kinds."""
    read = READ_ATTRIBUTE.get(proto.type)
    if read is None:
        raise UnsupportedModelError(f"attribute '{proto.name}': kind {proto.type} is not supported")
    return read(proto)


READ_ATTRIBUTE: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.FLOAT: lambda proto: proto.f,
    AttributeProto.INT: lambda proto: proto.i,
    AttributeProto.STRING: lambda proto: _text(proto.s),
    AttributeProto.TENSOR: lambda proto: tensor_of(proto.t),
    AttributeProto.FLOATS: lambda proto: tuple(proto.floats),
    AttributeProto.INTS: lambda proto: tuple(proto.ints),
    AttributeProto.STRINGS: lambda proto: tuple(_text(item) for item in proto.strings),
    AttributeProto.GRAPH: lambda proto: proto.g,
}


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def dense_of(proto: onnx.SparseTensorProto) -> Tensor:
    """Return a sparse initializer as a dense tensor."""
    values, indices = tensor_of(proto.values), tensor_of(proto.indices)
    sizes = tuple(proto.dims)
    try:
        flat = torch.zeros(sizes_of(sizes), dtype=values.dtype).reshape(-1)
    except Refused as exc:
        raise UnsupportedModelError(f"sparse tensor '{proto.values.name}': {exc}") from exc
    if indices.dim() == 2:
        weights = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
        indices = (indices * torch.tensor(weights)).sum(1)
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < flat.numel()):
        raise UnsupportedModelError(f"sparse tensor '{proto.values.name}': an index is out of range")
    flat[indices] = values
    return flat.reshape(sizes)
