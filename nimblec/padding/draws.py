"""Inputs for runs that show whether padding or splitting changes results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from nimblert import golden
from nimblert.arrays import layouts
from nimblert.plan import Program
from nimblert.plan.dimensions import Axes

Arrays: TypeAlias = Mapping[str, np.ndarray]
Sizes: TypeAlias = Mapping[str, int]
Axis: TypeAlias = Sequence[str | None]

_SEED = 0

_LARGE = {2: 10.0, 4: 1e3, 8: 1e3}
"""A factor for random padding, by bytes of a number: sums over it must be noticed, and must not overflow."""

_SMALL = 1e-3
"""A factor for random numbers amid which large padding would take each comparison the other way."""


class Draws:
    """Random inputs of one program, and boxes of them: the elements of some positions along named dimensions."""

    def __init__(self, program: Program, axes: Axes) -> None:
        self._program = program
        self._axes = axes.inputs
        self._masks = {tensor.name for tensor in program.inputs if tensor.mask}

    @cached_property
    def filled(self) -> dict[str, np.ndarray]:
        """Inputs that hold what calls are padded with."""
        drawn = self._drawn(_SEED)
        return {t.name: np.full_like(drawn[t.name], layouts.filling(t)) for t in self._program.inputs}

    def surrounded(
        self, starts: Sizes, stops: Sizes, is_taken: Callable[[Arrays], bool]
    ) -> Iterator[tuple[Arrays, ...]]:
        """Yield sets of inputs that are equal in the box, and differ around it.

        Usual numbers get usual and large neighbours, small numbers large ones, so that a maximum over all differs.
        Large numbers are left out unless ``is_taken`` accepts them.
        """
        masks = {name: self.filled[name] for name in self._masks}
        large = self._scaled(_SEED + 2, lambda itemsize: _LARGE.get(itemsize, 1.0), end=1) | masks
        small = self._scaled(_SEED, lambda _: _SMALL, end=0)
        wide = [large] if is_taken(large) else []
        around = (self.filled, self._drawn(_SEED + 1) | masks, *wide)
        for box, rests in ((self._drawn(_SEED), around), (small, (self.filled, *wide))):
            yield tuple(self.merged(self.fitting(box, stops), rest, starts, stops) for rest in rests)

    def bases(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield inputs for a comparison; with masks also of one sign, so that masked zeros are extremes."""
        drawn = self._drawn(_SEED)
        yield drawn
        if self._masks:
            for sign in (1, -1):
                away = {name: _away_from_zero(array, sign) for name, array in drawn.items()}
                yield {**away, **{name: drawn[name] for name in self._masks}}

    def fitting(self, base: Arrays, stops: Sizes) -> Arrays:
        """Return the ``base`` with integers no larger than the sizes that they lack, whose elements they may count."""
        found = dict(base)
        for tensor, of in zip(self._program.inputs, self._axes, strict=True):
            lacking = [stop for name, stop in stops.items() if name not in of]
            if lacking and found[tensor.name].dtype.kind in "iu":
                found[tensor.name] = np.minimum(found[tensor.name], min(lacking)).astype(found[tensor.name].dtype)
        return found

    def merged(self, base: Arrays, rest: Arrays, starts: Sizes, stops: Sizes) -> Arrays:
        """Return the ``rest`` with a box of the ``base`` in it."""
        # np.array also makes an array of a numpy scalar.
        merged = {name: np.array(array) for name, array in rest.items()}
        for tensor, of in zip(self._program.inputs, self._axes, strict=True):
            box = box_of(of, starts, stops)
            merged[tensor.name][box] = base[tensor.name][box]
        return merged

    def part(self, base: Arrays, starts: Sizes, stops: Sizes) -> Arrays:
        """Return a box of the ``base``."""
        sides = zip(self._program.inputs, self._axes, strict=True)
        return {tensor.name: base[tensor.name][box_of(of, starts, stops)] for tensor, of in sides}

    def _drawn(self, seed: int) -> dict[str, np.ndarray]:
        """Draw random inputs, with masks that leave everything."""
        drawn = golden.draw_inputs(self._program, seed)
        return drawn | {name: np.ones_like(drawn[name]) for name in self._masks}

    def _scaled(self, seed: int, factor: Callable[[int], float], end: int) -> dict[str, np.ndarray]:
        """Draw random floats times a factor, with integers and bools at one end of their range."""
        drawn = self._drawn(seed)
        for tensor in self._program.inputs:
            array = drawn[tensor.name]
            if tensor.name in self._masks:
                continue
            if array.dtype.kind in "biu":
                drawn[tensor.name] = np.full_like(array, (tensor.sample_range or (0, 1))[end])
            else:
                drawn[tensor.name] = (array * factor(array.dtype.itemsize)).astype(array.dtype)
        return drawn


def box_of(of: Axis, starts: Sizes, stops: Sizes) -> tuple[slice, ...]:
    """Return the elements from ``starts`` to ``stops`` along axes of named dimensions."""
    return tuple(slice(None) if name is None else slice(starts.get(name), stops.get(name)) for name in of)


def _away_from_zero(array: np.ndarray, sign: int) -> np.ndarray:
    return array if array.dtype.kind in "biuc" else (sign * (abs(array) + 1)).astype(array.dtype)
