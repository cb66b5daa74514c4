"""Values of unknown length: tensors of a bound, with the number of elements that a run fills along an axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nimblec.onnx_ops.arithmetic import choose
from nimblec.onnx_ops.axes import along, sizes_of
from nimblec.onnx_ops.table import Ints, Node, Refused
from nimblec.onnx_ops.unsigned import index_select

_RANGE = "known_range"
"""The attribute of a tensor that holds its range."""


class Range(NamedTuple):
    """The least and the largest values of a tensor, and the counts that it holds, in order; None for other elements."""

    least: Tensor
    most: Tensor
    counts: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A tensor of its bound. ``counts`` are int64 scalars by axis: so many elements are filled, others arbitrary."""

    values: Tensor
    counts: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        assert self.counts

    def masked(self, axis: int, neutral: Tensor) -> Tensor:
        """Return the values with ``neutral``, of their dtype, beyond the count along ``axis``."""
        x, count = self.values, self.counts[axis]
        return choose(along(torch.arange(x.shape[axis]) < count, axis, x.dim()), x, neutral)

    def sizes(self) -> Tensor:
        """Return the sizes of this run, int64."""
        return torch.stack([self.counts.get(axis, torch.tensor(n)) for axis, n in enumerate(self.values.shape)])


def counted(values: Tensor, counts: Mapping[int, Tensor]) -> Tensor | Counted:
    """Return a value with these counts, a plain tensor if there are none."""
    return Counted(values, counts) if counts else values


def range_of(tensor: Tensor) -> Range | None:
    """Return the range of a tensor, as far as it is known at import."""
    if not isinstance(tensor, FakeTensor):
        return Range(tensor, tensor, [None] * tensor.numel())
    found: Range | None = getattr(tensor, _RANGE, None)
    return found


def with_range(tensor: Tensor, least: Tensor, most: Tensor, counts: Sequence[Tensor | None] = ()) -> Tensor:
    """Note the range of a tensor, and return it; a tensor known at import if the range is one value."""
    if torch.equal(least, most):
        return least
    setattr(tensor, _RANGE, Range(least, most, counts or [None] * tensor.numel()))
    return tensor


def bounded(sizes: Tensor, node: Node) -> tuple[Ints, dict[int, Tensor]]:
    """Return the bound of a shape and its counts: the sizes that are not known at import.

    The first output of ``node`` has this shape. Raises `Refused` where nothing bounds it.
    """
    known = range_of(sizes)
    if known is not None:
        return sizes_of(known.most.clamp(min=0).reshape(-1).tolist()), counts_of(sizes, known)
    bound, flat = node.bound(0), sizes.reshape(-1).to(torch.int64).clamp(min=0)
    if len(bound) != flat.shape[0]:
        raise Refused(f"its output has {flat.shape[0]} dimensions; its bound is {bound}")
    return bound, {axis: flat.select(0, axis) for axis in range(len(bound))}


def counts_of(sizes: Tensor, known: Range) -> dict[int, Tensor]:
    """Return the sizes that are not known at import, by axis."""
    flat, unknown = sizes.reshape(-1).to(torch.int64), (known.least != known.most).reshape(-1).tolist()
    found = {}
    for axis, count in enumerate(known.counts):
        if unknown[axis]:
            found[axis] = flat.select(0, axis).clamp(min=0) if count is None else count
    return found


def places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the true elements of a vector, in order, zeros after them, and their number."""
    length = mask.shape[0]
    # All others are written to a place beyond the end.
    to = torch.where(mask, torch.cumsum(mask, 0) - 1, torch.tensor(length))
    found = torch.zeros(length + 1, dtype=torch.int64).scatter(0, to, torch.arange(length))
    return found.narrow(0, 0, length), mask.sum(dtype=torch.int64)


def non_zero(mask: Tensor) -> Counted:
    """Return the coordinates of the true elements, one column for each."""
    flat, count = places(mask.reshape(-1))
    rows = []
    for size in reversed(mask.shape):
        rows.append(torch.remainder(flat, max(1, size)))
        flat = torch.div(flat, max(1, size), rounding_mode="floor")
    if not rows:
        raise Refused("its input is a scalar; expected at least one dimension")
    return Counted(torch.stack(rows[::-1]), {1: count})


def unique(rows: Tensor, keys: Tensor, *, in_order: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the first of the rows that are equal, their places, the group of each row, the groups' sizes and number.

    ``keys`` are numbers by which rows are compared; groups come in the order of these, or of their first rows.
    """
    length = keys.shape[0]
    order = torch.arange(length)
    for column in reversed(range(keys.shape[1])):
        turned = torch.sort(torch.index_select(keys.select(1, column), 0, order), stable=True)[1]
        order = torch.index_select(order, 0, turned)
    arranged, following = torch.index_select(keys, 0, order), max(0, length - 1)
    differ = arranged.narrow(0, length - following, following) != arranged.narrow(0, 0, following)
    is_first = torch.cat([torch.ones(length - following, dtype=torch.bool), differ.any(1)])
    begins, count = places(is_first)
    group = torch.cumsum(is_first, 0) - 1
    sizes = torch.zeros(length, dtype=torch.int64).scatter_add(0, group, torch.ones_like(group))
    first = torch.index_select(order, 0, begins)
    group = torch.zeros_like(group).scatter(0, order, group)
    if not in_order:
        turned = torch.argsort(torch.where(torch.arange(length) < count, first, torch.tensor(length)), stable=True)
        first, sizes = (torch.index_select(vector, 0, turned) for vector in (first, sizes))
        group = torch.index_select(torch.argsort(turned), 0, group)
    return index_select(rows, 0, first), first, group, sizes, count
