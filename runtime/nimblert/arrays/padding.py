"""Padding: arrays at the start of a larger tensor."""

from dataclasses import replace

import numpy as np

from nimblert.plan import Tensor


def filling(tensor: Tensor) -> int:
    """The padding value of an input: 0, or its least value where 0 is outside its range."""
    low, high = tensor.sample_range or (0, 0)
    return 0 if tensor.mask or low <= 0 <= high else low


def head(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor cropped to ``shape``."""
    return tensor if shape == tensor.shape else replace(tensor, shape=shape)


def place(view: np.ndarray, array: np.ndarray, fill: int) -> None:
    """Copy an array to the start of a view of its dtype and rank, and write ``fill`` to the rest."""
    index = tuple(map(slice, array.shape))
    np.copyto(view[index], array)
    for axis, (given, size) in enumerate(zip(array.shape, view.shape, strict=True)):
        if given < size:
            view[(*index[:axis], slice(given, None))] = fill
