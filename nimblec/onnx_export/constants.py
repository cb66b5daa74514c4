"""Constants and descriptions of values, for translations of ATen to ONNX."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import ArrayLike
from onnx import numpy_helper
from onnxscript import opset18 as op

from nimblec.base.errors import UnsupportedModelError


def like(value: ArrayLike, other: Any) -> Any:
    """Return a constant of another value's dtype."""
    return op.Constant(value=numpy_helper.from_array(np.array(value, other.dtype.numpy())))


def ints(values: Sequence[int]) -> Any:
    """Return a constant of axes or sizes."""
    return op.Constant(value_ints=list(values))


def numbers_below(count: Any) -> Any:
    """Return the numbers from 0 up to a size (1,)."""
    zero, one = (op.Squeeze(ints([number])) for number in (0, 1))
    made: Any = op.Range(zero, op.Squeeze(count), one)
    return made


def unsqueezed(value: Any, axes: Sequence[int]) -> Any:
    """Return a value with these axes of size one, if any."""
    return op.Unsqueeze(value, ints(axes)) if axes else value


def described(value: Any, shape: Sequence[Any], other: Any) -> Any:
    """Return a value with its shape and another's dtype, which torch.onnx does not infer."""
    value.shape, value.dtype = onnx_ir.Shape(shape), other.dtype
    return value


def sizes(value: Any) -> list[int]:
    """Return the sizes of a value whose shape is known."""
    return [int(size) for size in value.shape]


def size(value: Any, axis: int) -> int:
    """Return the size of one axis; raises UnsupportedModelError where it is dynamic."""
    found = value.shape[axis]
    if not isinstance(found, int):
        raise UnsupportedModelError(f"an operator works along an axis of dynamic size ({found}): compile for one size")
    return found
