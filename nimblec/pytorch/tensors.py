"""torch tensors for a plan: the names of their dtypes, and conversions to and from arrays."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from nimblec.base.errors import CompileError, UnsupportedModelError
from nimblec.base.options import sample_range
from nimblert.arrays.layouts import numpy_dtype

T = TypeVar("T", torch.Tensor, np.ndarray)

DTYPE_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.uint16: "uint16",
    torch.int16: "int16",
    torch.uint32: "uint32",
    torch.int32: "int32",
    torch.uint64: "uint64",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
"""The plan's name of each torch dtype that a plan may hold."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The torch dtype of each such name."""


def check_dense(what: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedModelError for a tensor, called ``what``, that a plan cannot hold."""
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModelError(
            f"{what}: a plan cannot hold the dtype {tensor.dtype}: convert it, .to(torch.float32)"
        )
    if tensor.is_meta:
        raise UnsupportedModelError(f"{what}: a tensor of the device meta has no values: give one of the device cpu")
    if tensor.is_nested:
        raise UnsupportedModelError(f"{what}: a plan holds dense tensors, and this one is nested: give it padded")
    if tensor.layout is not torch.strided:
        raise UnsupportedModelError(
            f"{what}: a plan holds dense tensors, and this one is {tensor.layout}: give what .to_dense() returns"
        )


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an example input, given only its shape and dtype. Raises CompileError where no memory holds it."""
    example = torch.rand if dtype.is_floating_point else torch.zeros  # zeros would hide errors in sums
    try:
        return example(tuple(shape)).to(dtype)
    except RuntimeError as exc:
        raise CompileError(f"an input of shape {tuple(shape)} takes more memory than is here") from exc


def resized(array: T, shape: tuple[int, ...]) -> T:
    """Return the array repeated or cut along each axis: the numbers stay among those that it has."""
    if tuple(array.shape) == shape or len(array.shape) != len(shape) or not all(array.shape):
        return array
    for axis, size in enumerate(shape):
        places = np.arange(size) % array.shape[axis]
        array = array[(slice(None),) * axis + (places,)]
    return array


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over the array's memory, bfloat16 too."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def range_of(name: str, example: torch.Tensor) -> tuple[int, int] | None:
    """Return the `sample_range` of an input's example."""
    if example.dtype.is_floating_point or example.dtype.is_complex:
        return None
    return sample_range(name, as_array(example))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor as an array of the host, in C order, bfloat16 too."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return host.numpy()
