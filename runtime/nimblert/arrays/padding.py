"""Arrays in the head of a larger tensor: what lies beyond them, and the tensor that is the head."""

from dataclasses import replace

import numpy as np

from nimblert.plan import Tensor


def filling(tensor: Tensor) -> int:
    """What stands where a caller gives nothing: 0, or the least value of an input that 0 is no value of."""
    low, high = tensor.sample_range or (0, 0)
    return 0 if tensor.mask or low <= 0 <= high else low


def head(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a tensor along each axis, as many as ``shape`` says."""
    return tensor if shape == tensor.shape else replace(tensor, shape=shape)


def place(view: np.ndarray, array: np.ndarray, fill: int) -> None:
    """Copy an array into the head of a view of its dtype and rank, and ``fill`` the rest."""
    index = tuple(map(slice, array.shape))
    np.copyto(view[index], array)
    for axis, (given, size) in enumerate(zip(array.shape, view.shape, strict=True)):
        if given < size:
            view[(*index[:axis], slice(given, None))] = fill
