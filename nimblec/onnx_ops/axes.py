"""Axes and sizes as ONNX writes them."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from nimblec.onnx_ops.table import Ints, Refused

LARGEST = 1 << 34
"""Elements a tensor made from sizes in the model may have: beyond is a mistake, not a model."""


def axis_of(axis: int, rank: int) -> int:
    """Return ``axis`` counted from the front; raise `Refused` outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise Refused(f"axis {axis} is out of range for {rank} dimensions")
    return axis % rank


def axes_of(axes: Iterable[int], rank: int) -> Ints:
    """Return ``axes`` counted from the front; raise `Refused` where one is repeated."""
    found = tuple(axis_of(axis, rank) for axis in axes)
    if len(set(found)) != len(found):
        raise Refused(f"axes {found} repeat an axis")
    return found


def sizes_of(shape: Iterable[int]) -> Ints:
    """Return ``shape`` as a tuple; raise `Refused` for negative or absurd sizes."""
    sizes = tuple(shape)
    if any(size < 0 for size in sizes):
        raise Refused(f"shape {sizes} has a negative size")
    # An empty tensor may not have absurd sizes either: its strides would overflow.
    count = prod(max(1, size) for size in sizes)
    if count > LARGEST:
        raise Refused(f"shape {sizes} has {count} elements; expected at most {LARGEST}")
    return sizes


def repeated(values: Sequence[int] | None, count: int, default: int, name: str) -> Ints:
    """Return ``values``, or ``count`` times ``default`` where there are none."""
    if values is None:
        return (default,) * count
    if len(values) != count:
        raise Refused(f"attribute '{name}' is {tuple(values)}; expected {count} values")
    return tuple(values)


def zero_like(x: Tensor) -> Tensor:
    """Return a zero of the dtype of ``x``, known at import."""
    return torch.zeros((), dtype=x.dtype)


def along(vector: Tensor, axis: int, rank: int) -> Tensor:
    """Return a one-dimensional tensor as one of ``rank`` dimensions that varies along ``axis``."""
    return vector.reshape([-1 if i == axis else 1 for i in range(rank)])
