"""The abstract value of a proof: how the elements of a tensor depend on one named dimension of size n.

A call of s < n elements is padded: elements from s on are no part of it. The proof holds for every s from 1 to n - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import numpy as np

from nimblert.plan import Fit

Number: TypeAlias = float | int | bool
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Carrier:
    """An axis along which elements belong to positions of the dimension.

    The element i belongs to the position ``i // inner % extent``. Those before ``s + shift`` are a call's own: no
    padding reaches them. The others hold ``fill`` wherever the positions along all other carriers are a call's own;
    None: anything finite.
    """

    extent: int
    inner: int = 1
    shift: int = 0
    fill: Number | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: the axes that carry the dimension, and why padding or splitting changes its elements.

    ``padded`` and ``split`` are the faults, "" where there is none: a call's own elements depend on padding; an element
    depends on others, or on its position. ``array`` is the content of a known constant. Along the ``stretched`` axes
    all elements are equal, since they were broadcast. ``parts`` are the columns of one element that a value was joined
    of along its last axis. ``is_sized`` is false where the shape is unknown.
    """

    shape: Shape
    axes: Mapping[int, Carrier] = field(default_factory=dict)
    array: np.ndarray | None = None
    stretched: frozenset[int] = frozenset()
    padded: str = ""
    split: str = ""
    parts: "tuple[Value, ...]" = ()
    is_sized: bool = True

    def is_plain(self, axis: int) -> bool:
        """Return whether an axis has one element for each position of the dimension."""
        carrier = self.axes[axis]
        return carrier.inner == 1 and self.shape[axis] == carrier.extent

    def counts(self, axis: int, carrier: Carrier) -> bool:
        """Return whether a constant holds along an axis the position of each element on a carrier."""
        if self.array is None or self.array.ndim <= axis:
            return False
        places = np.arange(self.array.shape[axis]) // carrier.inner % carrier.extent
        return bool((np.moveaxis(self.array, axis, -1) == places).all())

    def is_even(self, axis: int) -> bool:
        """Return whether all elements along an axis are known to be equal."""
        if axis in self.stretched:
            return True
        if self.array is None:
            return False
        first = self.array.take([0], axis)
        return self.array.strides[axis] == 0 or bool((self.array == first).all())

    def fill(self, axis: int, others: Sequence[int] = ()) -> Number | None:
        """Return the number that padding along an axis holds; a constant also holds it beyond ``others``' positions.

        A position k of a constant is padding for some call whose positions along the other axes are its own if it
        exceeds these, and 0.
        """
        if axis in self.axes:
            return self.axes[axis].fill
        if self.array is None or not self.array.size or self.array.dtype.kind not in "biuf":
            return None
        padding = self.array
        if self.array.size > 1 and not self.is_even(axis):
            places = np.indices(self.array.shape, sparse=True)
            own = max((places[other] for other in others), key=np.size, default=np.zeros(1, int))
            for other in others:
                own = np.maximum(own, places[other])
            padding = self.array[np.broadcast_to(places[axis] > own, self.array.shape)]
        first = padding.flat[0]
        return first.item() if (padding == first).all() else None


@dataclass(frozen=True, slots=True)
class Proof:
    """The calls of other sizes that the graph of a program allows in one dimension, and why it allows no more."""

    fit: Fit
    fault: str = ""


def prove(outputs: Sequence[tuple[Value, Sequence[str | None]]], name: str, size: int) -> Proof:
    """Prove how a program serves other sizes of the dimension ``name``, given its outputs and their dimensions.

    A program for one element has no padding, and shows nothing of how elements affect each other.
    """
    if size < 2:
        return Proof(Fit.SPLIT)
    padded = split = ""
    for value, dimensions in outputs:
        padded, split = padded or value.padded, split or value.split
        for axis, carrier in value.axes.items():
            if dimensions[axis] != name or not value.is_plain(axis) or carrier.shift < 0:
                padded = padded or value.split or f"an output has elements of several {name} on axis {axis}"
        if dimensions.count(name) != 1:
            split = split or f"an output has {dimensions.count(name) or 'no'} axes of {name}"
        elif dimensions.index(name) not in value.axes:
            split = split or f"an output counts the positions of {name}"
    if padded:
        return Proof(Fit.EXACT, padded)
    return Proof(Fit.PADDED, split) if split else Proof(Fit.SPLIT)


def given(shape: Shape, dimensions: Sequence[str | None], name: str, fill: Number | None) -> Value:
    """Return an input whose axes have these dimensions, and whose padding holds ``fill`` if that is known."""
    sides = enumerate(zip(shape, dimensions, strict=True))
    return Value(shape, {axis: Carrier(size, fill=fill) for axis, (size, of) in sides if of == name})


def constant(array: np.ndarray) -> Value:
    """Return a known constant."""
    return Value(array.shape, array=array)


def without_fill(carrier: Carrier) -> Carrier:
    """Return a carrier whose padding holds anything."""
    return replace(carrier, fill=None)


def inner_of(shape: Shape, axis: int) -> int:
    """Return how many elements follow each other for one step along an axis."""
    return prod(shape[axis + 1 :])
