"""Layouts of arrays, and the gathers that copy from one layout to another."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from nimblert.errors import DeviceMismatchError
from nimblert.plan import ITEM_NBYTES, Tensor

MOST_AXES = 8
"""The most axes of a gather (layout.cu), after contiguous ones are merged."""

_MOST_ELEMENTS = (1 << 32) - (1 << 24)
"""The most elements of a gather by a kernel: its threads count in 32 bits, up to a grid of 1 << 24 beyond the last."""


@dataclass(frozen=True, slots=True)
class Gather:
    """A copy into a dense destination, in the order of its memory, from a strided source.

    ``sizes`` and ``strides`` (of the source, in elements) are those of the destination's axes, the outermost first;
    axes that are contiguous in both are merged.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def is_copy(self) -> bool:
        """Whether source and destination have the same layout."""
        return len(self.sizes) == 1 and self.strides == (1,)

    def parameters(self, to: int, source: int) -> bytes:
        """Return the parameters of the kernels of layout.cu, for arrays at these addresses."""
        room = (0,) * (MOST_AXES - len(self.sizes))
        return struct.pack(
            "<QQII8I8q", to, source, self.count, len(self.sizes), *self.sizes, *room, *self.strides, *room
        )


def gather(shape: Sequence[int], to: Sequence[int], source: Sequence[int]) -> Gather | None:
    """Return the gather that fills a tensor of strides ``to`` from one of strides ``source``, all in elements.

    None where the destination has gaps or overlaps, or the copy has more axes or elements than a kernel takes.
    """
    if not is_dense(shape, to):
        return None
    sizes: list[int] = []
    strides: list[int] = []
    for axis in sorted((axis for axis, size in enumerate(shape) if size != 1), key=lambda axis: -to[axis]):
        if sizes and strides[-1] == shape[axis] * source[axis]:
            sizes[-1] *= shape[axis]
            strides[-1] = source[axis]
        else:
            sizes.append(shape[axis])
            strides.append(source[axis])
    made = Gather(tuple(sizes), tuple(strides)) if sizes else Gather((prod(shape),), (1,))
    is_for_kernel = len(sizes) <= MOST_AXES and made.count <= _MOST_ELEMENTS
    return made if made.is_copy or is_for_kernel else None


def is_dense(shape: Sequence[int], strides: Sequence[int], step: int = 1) -> bool:
    """Return whether the elements have neither gaps nor overlaps, in any order of axes.

    ``step`` is the stride of adjacent elements, 1 for strides in elements.
    """
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def overlaps(shape: Sequence[int], strides: Sequence[int], step: int = 1) -> bool:
    """Return whether two elements may share memory. ``step`` is the stride of adjacent elements, as in `is_dense`."""
    if 0 in shape:
        return False
    end = step
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride < end:
            return True
        end += stride * (size - 1)
    return False


def has_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether bytes between the first and the last element belong to no element; strides are not negative."""
    end = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride > end:
            return 0 not in shape
        end += stride * (size - 1)
    return False


def strided(memory: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return the tensor in these bytes, as a view with its strides."""
    dtype = numpy_dtype(tensor.dtype)
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    return np.ndarray(tensor.shape, dtype, buffer=memory, strides=strides)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of an array in C order, in elements."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[: len(shape)][::-1]


def dense_like(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for a shape, with the axes in the order of ``strides``."""
    dense = [0] * len(shape)
    end = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis)):
        dense[axis] = end
        end *= shape[axis]
    return tuple(dense)


def in_memory_order(array: np.ndarray) -> np.ndarray:
    """Return a one-dimensional view of a dense array, in the order of its memory."""
    return array.transpose(memory_order(array.strides)).reshape(-1)


def spanned(array: np.ndarray, nbytes: int) -> np.ndarray:
    """Return the ``nbytes`` that an array without negative strides spans."""
    first = np.lib.stride_tricks.as_strided(array, (1,), (array.itemsize,)).view(np.uint8)
    return np.lib.stride_tricks.as_strided(first, (nbytes,), (1,))


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the axes from the outermost to the innermost."""
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def element_strides(array: np.ndarray) -> tuple[int, ...]:
    """Return the strides of a dense array in elements."""
    return tuple(stride // array.itemsize for stride in array.strides)


def filling(tensor: Tensor) -> int:
    """Return the padding value of an input: 0, or its least value where 0 is outside its range."""
    low, high = tensor.sample_range or (0, 0)
    return 0 if tensor.mask or low <= 0 <= high else low


def head(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor cropped to ``shape``."""
    return tensor if shape == tensor.shape else replace(tensor, shape=shape)


def place(view: np.ndarray, array: np.ndarray, fill: int) -> None:
    """Copy an array to the start of a view of its dtype and rank, and write ``fill`` to the rest."""
    index = tuple(map(slice, array.shape))
    np.copyto(view[index], array)
    for axis, (given, size) in enumerate(zip(array.shape, view.shape, strict=True)):
        if given < size:
            view[(*index[:axis], slice(given, None))] = fill


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy dtype of a plan's dtype name; bfloat16 comes from ml_dtypes."""
    if name not in ITEM_NBYTES:
        raise ValueError(f"dtype {name!r} is not one that a plan may name")
    if name == "bfloat16":
        try:
            import ml_dtypes  # takes 20 ms
        except ImportError as exc:
            raise DeviceMismatchError("bfloat16 tensors need ml_dtypes: pip install 'nimblert[bfloat16]'") from exc
        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
