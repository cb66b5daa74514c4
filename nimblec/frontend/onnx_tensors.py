"""ONNX tensors and attributes as torch tensors and Python values."""

import warnings
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, numpy_helper
from torch import Tensor

from nimblec.errors import UnsupportedModelError
from nimblec.frontend.onnx_ops.axes import sizes_of
from nimblec.frontend.onnx_ops.creation import ELEMENT_TYPES


def tensor_of(proto: TensorProto) -> Tensor:
    """Return the CPU tensor of an initializer, on the proto's own bytes where they allow it.

    Raises UnsupportedModelError for dtypes that torch lacks and data that do not fit the shape.
    """
    dtype = ELEMENT_TYPES.get(proto.data_type)
    if dtype is None:
        name = TensorProto.DataType.Name(proto.data_type) if proto.data_type in TensorProto.DataType.values() else "?"
        raise UnsupportedModelError(f"tensor '{proto.name}': element type {name} ({proto.data_type}) is not supported")
    try:
        array = numpy_helper.to_array(proto)
    except (ValueError, TypeError, RuntimeError, OSError) as exc:
        raise UnsupportedModelError(f"tensor '{proto.name}': its data do not fit its shape ({exc})") from exc
    if dtype == torch.bfloat16:
        return _from_array(array.view(np.int16)).view(torch.bfloat16)
    return _from_array(array)


def _from_array(array: np.ndarray) -> Tensor:
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Constants are never written to; torch warns once about memory that must not be.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def attribute_of(proto: AttributeProto) -> Any:
    """Return an attribute as a number, string, tuple, tensor or graph; None for other kinds."""
    kind = proto.type
    if kind == AttributeProto.FLOAT:
        return proto.f
    if kind == AttributeProto.INT:
        return proto.i
    if kind == AttributeProto.STRING:
        return proto.s.decode("utf-8", errors="replace")
    if kind == AttributeProto.TENSOR:
        return tensor_of(proto.t)
    if kind == AttributeProto.FLOATS:
        return tuple(proto.floats)
    if kind == AttributeProto.INTS:
        return tuple(proto.ints)
    if kind == AttributeProto.STRINGS:
        return tuple(item.decode("utf-8", errors="replace") for item in proto.strings)
    if kind == AttributeProto.GRAPH:
        return proto.g
    raise UnsupportedModelError(
        f"attribute '{proto.name}': kind {onnx.AttributeProto.AttributeType.Name(kind)} is not supported"
    )


def dense_of(proto: onnx.SparseTensorProto) -> Tensor:
    """Return a sparse initializer as a dense tensor."""
    values, indices = tensor_of(proto.values), tensor_of(proto.indices)
    sizes = tuple(proto.dims)
    flat = torch.zeros(sizes_of(sizes), dtype=values.dtype).reshape(-1)
    if indices.dim() == 2:
        weights = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
        indices = (indices * torch.tensor(weights)).sum(1)
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < flat.numel()):
        raise UnsupportedModelError(f"sparse tensor '{proto.values.name}': an index is out of range")
    flat[indices] = values
    return flat.reshape(sizes)
