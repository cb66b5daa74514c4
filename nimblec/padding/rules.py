"""The kinds of operators: how the results of each depend on a dimension, given how its operands do.

Every rule takes the shape of its result, and assumes that numbers are finite: 0 times anything is 0. What no rule
knows is `Propagation.unknown`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from nimblec.padding.folds import Fold, IsNeutral, is_low, is_zero, never, to_any
from nimblec.padding.values import Carrier, Number, Shape, Value, constant, inner_of, without_fill


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The results of one call of an operator in a proof for the dimension ``name``; ``what`` describes it in notes."""

    what: str
    name: str

    def unknown(self, operands: Sequence[Value], shape: Shape | None) -> Value:
        """Return a result in which any element may depend on all operands."""
        result = Value(shape or (), is_sized=shape is not None)
        if any(value.axes for value in operands):
            return self._crossed(operands, result)
        return self._joined(operands, result)

    def after(self, causes: Sequence[Value], result: Value) -> Value:
        """Return a result that also depends on scalars, as on the condition of a branch."""
        if any(value.axes for value in causes):
            return self._crossed(causes, result)
        return self._joined(causes, result)

    def _fault(self, verb: str) -> str:
        return f"{self.what} {verb} {self.name}"

    def _joined(self, operands: Sequence[Value], result: Value) -> Value:
        """Add the faults of the operands to a result."""
        padded = next((value.padded for value in operands if value.padded), result.padded)
        split = next((value.split for value in operands if value.split), result.split)
        return replace(result, padded=padded, split=split)

    def _mixed(self, operands: Sequence[Value], result: Value, verb: str = "computes across") -> Value:
        """Return a result whose elements depend on others, and not on padding."""
        return self._joined(operands, replace(result, split=result.split or self._fault(verb)))

    def _crossed(self, operands: Sequence[Value], result: Value) -> Value:
        """Return a result whose elements may depend on padding."""
        fault = self._fault("computes across")
        return self._joined(operands, replace(result, padded=fault, split=fault))


class _Arithmetic(_Outcome):
    """Operators that compute."""

    __slots__ = ()

    def elementwise(self, operands: Sequence[Value], shape: Shape, fold: Fold = to_any) -> Value:
        """Return the result of an operator that computes each element from those at its place, after broadcasting."""
        aligned = [_aligned(value, shape) for value in operands]
        axes: dict[int, Carrier] = {}
        stretched = set()
        split = ""
        for axis in range(len(shape)):
            along = [value for value in aligned if value.shape[axis] != 1 or axis in value.axes]
            carriers = [value.axes[axis] for value in along if axis in value.axes]
            fixed = [value for value in along if axis not in value.axes]
            if not carriers:
                if fixed and all(axis in value.stretched for value in fixed):
                    stretched.add(axis)
                continue
            first = carriers[0]
            if any((c.extent, c.inner) != (first.extent, first.inner) for c in carriers):
                return self._crossed(operands, Value(shape))
            if not all(value.is_even(axis) for value in fixed):
                split = self._fault("uses positions along")
            axes[axis] = replace(first, shift=min(c.shift for c in carriers))
        plain = [axis for axis, of in axes.items() if of.inner == 1 and of.extent == shape[axis]]
        for axis, carrier in axes.items():
            own = without_fill(carrier)
            # The same elements along these axes are a call's own.
            others = [other for other in plain if axis in plain and other != axis and without_fill(axes[other]) == own]
            fills = [_fill_of(value, axis, carrier.shift, others) for value in aligned]
            axes[axis] = replace(carrier, fill=fold(fills))
        return self._joined(operands, Value(shape, axes, stretched=frozenset(stretched), split=split))

    def reduce(
        self,
        x: Value,
        over: Collection[int],
        shape: Shape,
        is_neutral: IsNeutral = never,
        *,
        keeps: bool = True,
        fold: Fold = to_any,
    ) -> Value:
        """Return a reduction over axes, which stay as axes of size 1 if ``keeps``.

        ``is_neutral`` tells whether a number in all padding changes no result.
        """
        reduced = sorted(axis for axis in x.axes if axis in over)
        left = [axis for axis in range(len(x.shape)) if keeps or axis not in over]
        kept = {left.index(axis): carrier for axis, carrier in x.axes.items() if axis not in over}
        even = frozenset(left.index(axis) for axis in x.stretched if axis not in over)
        if not reduced:
            axes = {axis: replace(carrier, fill=fold([carrier.fill])) for axis, carrier in kept.items()}
            return self._joined([x], Value(shape, axes, stretched=even))
        result = Value(shape, {axis: without_fill(carrier) for axis, carrier in kept.items()}, stretched=even)
        carrier = x.axes[reduced[0]]
        if len(reduced) == 1 and carrier.shift >= 0 and is_neutral(carrier.fill):
            return self._mixed([x], result)
        return self._crossed([x], result)

    def whole(self, x: Value, over: Collection[int], shape: Shape) -> Value:
        """Return a result with the operand's axes that computes across all of some, as a norm or a sort."""
        axes = {axis: without_fill(carrier) for axis, carrier in x.axes.items() if axis not in over}
        if len(axes) < len(x.axes):
            return self._crossed([x], Value(shape, axes))
        return self._joined([x], Value(shape, axes))

    def softmax(self, x: Value, over: Collection[int], weight: Number | None = 0) -> Value:
        """Return a softmax, in which masked scores have no weight: their results are ``weight``."""
        crossed = [axis for axis in x.axes if axis in over]
        if len(crossed) != 1 or not is_low(x.axes[crossed[0]].fill) or x.axes[crossed[0]].shift < 0:
            return self.whole(x, over, x.shape)
        axes = {axis: without_fill(carrier) for axis, carrier in x.axes.items()}
        axes[crossed[0]] = replace(axes[crossed[0]], fill=weight)
        return self._mixed([x], Value(x.shape, axes))

    def contract(self, operands: Sequence[Value], labels: Sequence[str], result: str, shape: Shape) -> Value:
        """Return the sum of products that an Einstein summation describes."""
        axes: dict[int, Carrier] = {}
        stretched = set()
        split = ""
        is_mixed = False
        sized = [dict(zip(of, range(len(of)), strict=True)) for of in labels]
        if any(len(at) != len(v.shape) for at, v in zip(sized, operands, strict=True)):
            return self.unknown(operands, shape)
        for label in dict.fromkeys("".join(labels)):
            along = [(value, at[label]) for value, at in zip(operands, sized, strict=True) if label in at]
            carriers = [value.axes[axis] for value, axis in along if axis in value.axes]
            fixed = [(v, axis) for v, axis in along if axis not in v.axes and v.shape[axis] > 1]
            if not carriers:
                if label in result and fixed and all(axis in value.stretched for value, axis in fixed):
                    stretched.add(result.index(label))
                continue
            first = carriers[0]
            if any((c.extent, c.inner) != (first.extent, first.inner) for c in carriers):
                return self._crossed(operands, Value(shape))
            shift = min(c.shift for c in carriers)
            fill = 0 if any(is_zero(_fill_of(value, axis, shift)) for value, axis in along) else None
            if label in result:
                axes[result.index(label)] = replace(first, shift=shift, fill=fill)
                split = split or (
                    "" if all(v.is_even(axis) for v, axis in fixed) else self._fault("uses positions along")
                )
            elif fill is None or shift < 0 or is_mixed:
                return self._crossed(operands, Value(shape))
            else:
                is_mixed = True
        if is_mixed:
            return self._mixed(operands, Value(shape, {k: without_fill(c) for k, c in axes.items()}))
        return self._joined(operands, Value(shape, axes, stretched=frozenset(stretched), split=split))

    def window(self, x: Value, windows: Mapping[int, tuple[int, int, int]], shape: Shape, fill: Number | None) -> Value:
        """Return what a convolution or pooling computes of windows along axes: (elements, stride, padding before).

        Windows reach over the ends, where they see ``fill``. Other axes stay.
        """
        axes = {axis: without_fill(carrier) for axis, carrier in x.axes.items()}
        is_mixed = False
        for axis, (reach, stride, before) in windows.items():
            if axis not in x.axes or (reach == stride == 1 and not before and shape[axis] == x.shape[axis]):
                continue
            carrier = x.axes[axis]
            if stride != 1 or not x.is_plain(axis):
                return self._crossed([x], Value(shape))
            is_neutral = fill is not None and carrier.fill == fill and shape[axis] == x.shape[axis]
            shift = carrier.shift if is_neutral else carrier.shift + before - reach + 1
            axes[axis] = Carrier(shape[axis], shift=shift)
            is_mixed = True
        result = Value(shape, axes)
        return self._mixed([x], result) if is_mixed else self._joined([x], result)

    def scan(self, x: Value, along: int, *, backward: bool = False) -> Value:
        """Return a running result along an axis, as of a cumulative sum, or one of zeros where it runs ``backward``."""
        axes = {axis: without_fill(carrier) for axis, carrier in x.axes.items()}
        result = Value(x.shape, axes)
        if along not in x.axes:
            return self._joined([x], result)
        if not x.is_plain(along) or (backward and not is_zero(x.axes[along].fill)):
            return self._crossed([x], result)
        return self._mixed([x], result)


class Propagation(_Arithmetic):
    """One call of an operator; the methods here move elements, those inherited compute."""

    __slots__ = ()

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Return the same elements in order in another shape, of which one axis must have the whole dimension."""
        axes: dict[int, Carrier] = {}
        for axis, carrier in x.axes.items():
            inner = inner_of(x.shape, axis) * carrier.inner
            target = _axis_of(shape, inner, carrier.extent)
            if target is None or target in axes:
                return self._crossed([x], Value(shape))
            axes[target] = replace(carrier, inner=inner // inner_of(shape, target))
        places = (_axis_of(shape, inner_of(x.shape, axis), x.shape[axis]) for axis in x.stretched)
        even = {at for at in places if at is not None and shape[at] in x.shape}
        array = None if x.array is None else x.array.reshape(shape)
        return self._joined([x], Value(shape, axes, array, frozenset(even)))

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        """Return the operand with its axes in another order."""
        axes = {at: x.axes[axis] for at, axis in enumerate(order) if axis in x.axes}
        even = frozenset(at for at, axis in enumerate(order) if axis in x.stretched)
        array = None if x.array is None else x.array.transpose(order)
        return self._joined([x], Value(tuple(x.shape[axis] for axis in order), axes, array, even))

    def expand(self, x: Value, shape: Shape) -> Value:
        """Return the operand broadcast or repeated to a shape."""
        aligned = _aligned(x, shape)
        if any(carrier.shift and aligned.shape[axis] != shape[axis] for axis, carrier in aligned.axes.items()):
            return self._crossed([x], Value(shape))
        even = {axis for axis, size in enumerate(aligned.shape) if size == 1 and axis not in aligned.axes}
        return self._joined([x], Value(shape, aligned.axes, stretched=frozenset(even | aligned.stretched)))

    def gather(self, data: Value, indices: Value, axis: int, shape: Shape) -> Value:
        """Return the entries of ``data`` along an axis that ``indices`` name; their axes take its place."""
        count = len(indices.shape)
        moved = {k if k < axis else k - 1 + count: c for k, c in data.axes.items() if k != axis}
        axes = {**moved, **{axis + k: without_fill(c) for k, c in indices.axes.items()}}
        even = frozenset(axis + k for k in indices.stretched)
        result = Value(shape, axes, stretched=even)
        if axis not in data.axes:
            return self._joined([data, indices], result)
        carrier, picked = data.axes[axis], indices.array
        is_own = picked is not None and picked.min(initial=0) == 0 and picked.max(initial=0) <= carrier.shift
        # A call has at least one element, and as many more as the shift says.
        if is_own and data.is_plain(axis):
            return self._mixed([data, indices], result, "selects along")
        return self._crossed([data, indices], result)

    def pick(self, data: Value, indices: Sequence[Value], shape: Shape) -> Value:
        """Return the entry of each position of ``data`` along its first axis, at vectors of indices along the next."""
        places, *others = indices
        carrier, depth = data.axes.get(0), len(indices)
        is_counted = carrier is not None and data.is_plain(0) and places.counts(0, carrier)
        if carrier is None or not is_counted or any(axis in data.axes for axis in range(1, depth)):
            return self.unknown([data, *indices], shape)
        count = data.shape[:1]
        row = self.elementwise([Value(count, {0: without_fill(carrier)}), *others], count)
        axes = {axis - depth + 1: c for axis, c in data.axes.items() if axis >= depth}
        return self._joined([data], replace(row, shape=shape, axes={**axes, **row.axes}))

    def pick_in_order(self, data: Value, indices: Sequence[np.ndarray], shape: Shape) -> Value:
        """Return the entries at constant ``indices``, of one shape, along the first axes of ``data``.

        They may name all positions of the dimension in their order, and nothing else along it.
        """
        lead, depth = indices[0].ndim, len(indices)
        axes = {axis - depth + lead: carrier for axis, carrier in data.axes.items() if axis >= depth}
        for axis, carrier in data.axes.items():
            if axis < depth:
                column = constant(indices[axis])
                sized = (at for at, size in enumerate(column.shape) if size == carrier.extent)
                place = next((at for at in sized if column.counts(at, carrier)), None)
                if place is None or not data.is_plain(axis):
                    return self._crossed([data], Value(shape))
                axes[place] = carrier
        return self._joined([data], Value(shape, axes))

    def crop(self, x: Value, starts: Mapping[int, int], shape: Shape, steps: Mapping[int, int] | None = None) -> Value:
        """Return the part of the operand that begins at ``starts`` along some axes, and has a shape."""
        axes = dict(x.axes)
        for axis, start in starts.items():
            if axis not in axes or (start == 0 and shape[axis] == x.shape[axis] and (steps or {}).get(axis, 1) == 1):
                continue
            carrier = axes.pop(axis)
            if not x.is_plain(axis) or start < 0 or (shape[axis] > 1 and (steps or {}).get(axis, 1) != 1):
                return self._crossed([x], Value(shape, axes))
            if shape[axis] > 1:
                axes[axis] = replace(carrier, extent=shape[axis], shift=carrier.shift - start)
            elif start > carrier.shift:
                return self._crossed([x], Value(shape, axes))
        result = Value(shape, axes, stretched=x.stretched)
        return self._joined([x], result) if axes == x.axes else self._mixed([x], result, "selects along")

    def pad(
        self, x: Value, before: Sequence[int], shape: Shape, fill: Number | None, *, repeats: bool = False
    ) -> Value:
        """Return the operand with elements that hold ``fill`` around it, or that ``repeats`` those of its ends."""
        axes: dict[int, Carrier] = {}
        for axis, carrier in x.axes.items():
            grown = shape[axis] != x.shape[axis] or before[axis]
            if grown and (repeats or not x.is_plain(axis)):
                return self._crossed([x], Value(shape))
            kept = carrier.fill if carrier.fill == fill else None
            moved = replace(carrier, extent=shape[axis], shift=carrier.shift + before[axis], fill=kept)
            axes[axis] = moved if grown else carrier
        result = Value(shape, axes)
        return self._joined([x], result) if axes == x.axes else self._mixed([x], result, "shifts along")

    def concat(self, operands: Sequence[Value], along: int, shape: Shape, fold: Fold = to_any) -> Value:
        """Return the operands one after the other along an axis."""
        rest = tuple(1 if axis == along else size for axis, size in enumerate(shape))
        cut = [flat_along(value, along) for value in operands]
        result = replace(self.elementwise(cut, rest, fold), shape=shape)
        first = next((i for i, value in enumerate(operands) if along in value.axes), None)
        if first is None or result.padded:
            return replace(result, array=None)
        if not operands[first].is_plain(along):
            return self._crossed(operands, Value(shape))
        before = sum(value.shape[along] for value in operands[:first])
        carrier = operands[first].axes[along]
        joined = Carrier(shape[along], shift=carrier.shift + before)
        return self._mixed(operands, replace(result, axes={**result.axes, along: joined}), "joins along")


def product(step: Propagation, left: Value, right: Value, shape: Shape) -> Value:
    """Return a product of matrices with batches, or of vectors."""
    batch = "abcdefghijkl"[: max(len(left.shape), len(right.shape), 2) - 2]
    one, other = (batch[len(batch) + 2 - len(value.shape) :] if len(value.shape) > 2 else "" for value in (left, right))
    row, column = ("m" if len(left.shape) > 1 else ""), ("n" if len(right.shape) > 1 else "")
    return step.contract([left, right], [f"{one}{row}z", f"{other}z{column}"], f"{batch}{row}{column}", shape)


def _aligned(value: Value, shape: Shape) -> Value:
    """Return the operand with leading axes of size 1, so that it has the rank of a result."""
    more = len(shape) - len(value.shape)
    if more <= 0:
        return value
    return replace(
        value,
        shape=(1,) * more + value.shape,
        axes={axis + more: carrier for axis, carrier in value.axes.items()},
        array=None if value.array is None else value.array.reshape((1,) * more + value.array.shape),
        stretched=frozenset(axis + more for axis in value.stretched),
    )


def _fill_of(value: Value, axis: int, shift: int, others: Sequence[int] = ()) -> Number | None:
    """Return the number that an operand holds wherever a result with this shift along an axis is padding."""
    own = value.axes[axis].shift if axis in value.axes else 0
    present = [other for other in others if value.array is not None and value.array.shape[other] > 1]
    return value.fill(axis, present) if shift >= own else None


def flat_along(value: Value, axis: int) -> Value:
    """Return the operand as if it had one element along an axis."""
    shape = tuple(1 if at == axis else size for at, size in enumerate(value.shape))
    even = frozenset(at for at in range(len(shape)) if at != axis and value.array is not None and value.is_even(at))
    return Value(
        shape,
        {at: carrier for at, carrier in value.axes.items() if at != axis},
        stretched=value.stretched | even,
        padded=value.padded,
        split=value.split,
    )


def _axis_of(shape: Shape, inner: int, extent: int) -> int | None:
    """Return the axis that has all positions, ``inner`` elements apart, of an axis of ``extent`` in another shape."""
    for axis, size in enumerate(shape):
        after = prod(shape[axis + 1 :])
        if after and inner % after == 0 and (after * size) % (inner * extent) == 0 and extent > 1:
            return axis
    return None
