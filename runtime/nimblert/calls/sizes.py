"""Calls of sizes that no program is for: padded to the smallest program that covers them, or split into several runs.

`Program.fits` holds what the compiler found out about each dimension. An axis has a named dimension if its size
equals that dimension's in every program of the entry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import TypeAlias

from nimblert.dimensions import Axes, Shape, resized
from nimblert.plan import Fit, Program, Tensor

Index: TypeAlias = tuple[slice, ...]

_KEPT = 256
"""The most combinations of shapes whose runs an entry remembers."""

_KEPT_RUNS = 64
"""The most runs of a call that are remembered; of more each is made when its turn comes."""

_WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a program within a call. ``shapes`` are those of the valid outputs; what is beyond them is padding."""

    program: Program
    shapes: tuple[Shape, ...]


Run: TypeAlias = tuple[Part, Sequence[Index], Sequence[Index]]
"""A run with the elements of the inputs that it takes, and of the outputs that it gives."""


@dataclass(frozen=True, slots=True)
class Served:
    """The runs of a call, ``count`` of them, and the outputs of all together. All but the ``last`` are ``first``."""

    count: int
    first: Part
    last: Part
    runs: Iterable[Run]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a call that is split, made one by one: each takes ``step`` of a dimension, and the last the rest.

    ``inputs`` and ``outputs`` tell of each axis whether it has that dimension.
    """

    count: int
    first: Part
    last: Part
    step: int
    inputs: Sequence[Sequence[bool]]
    outputs: Sequence[Sequence[bool]]

    def __iter__(self) -> Iterator[Run]:
        for number in range(self.count):
            taken = slice(number * self.step, (number + 1) * self.step)
            part = self.first if number + 1 < self.count else self.last
            yield part, _indices(self.inputs, taken), _indices(self.outputs, taken)


class Sizes:
    """The sizes that the programs of an entry serve; the plan must be valid."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = sorted(programs, key=_volume)
        self._axes = Axes(programs)
        self.serve = lru_cache(_KEPT)(self._serve)
        """The runs of a call with inputs of these shapes; None where there are none."""

    def _serve(self, shapes: tuple[Shape, ...]) -> Served | None:
        sizes = self._axes.sizes(shapes)
        if sizes is None:
            return None
        program = self._cover(shapes, sizes)
        if program is not None:
            part = self._part(program, sizes)
            return Served(1, part, part, ((part, (), ()),), self._outputs(program, sizes))
        return next(filter(None, (self._split(shapes, sizes, name) for name in sizes)), None)

    def _split(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], name: str) -> Served | None:
        """Runs of the program for the largest part of a dimension, and one for the rest; None where there are none."""
        ends = [(dict(program.profile)[name], program) for program in self._programs]
        fitting = [(end, p) for end, p in ends if self._covers(p, shapes, {**sizes, name: end}, split=name)]
        if not fitting or sizes[name] < 1:
            return None
        step, largest = max(fitting, key=itemgetter(0))
        count = 1 + (sizes[name] - 1) // step
        left = {**sizes, name: sizes[name] - (count - 1) * step}
        first = self._part(largest, {**sizes, name: step})
        last = self._part(self._cover(shapes, left, split=name) or largest, left)
        inputs = [[axis == name for axis in axes] for axes in self._axes.inputs]
        outputs = [[axis == name for axis in axes] for axes in self._axes.outputs]
        runs = _Runs(count, first, last, step, inputs, outputs)
        kept = tuple(runs) if count <= _KEPT_RUNS else runs
        return Served(count, first, last, kept, self._outputs(largest, sizes))

    def _cover(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None = None) -> Program | None:
        """The smallest program for these sizes."""
        return next((p for p in self._programs if self._covers(p, shapes, sizes, split)), None)

    def _covers(
        self, program: Program, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None
    ) -> bool:
        """Whether a program serves these sizes and the other axes; of dimension ``split`` it is a part."""
        fits = dict(zip((name for name, _ in program.profile), program.fits, strict=False))
        for name, size in program.profile:
            given = sizes.get(name, size)
            fit = fits.get(name, Fit.EXACT)
            if not 0 < given <= size or (given < size and fit is Fit.EXACT) or (name == split and fit is not Fit.SPLIT):
                return False
        return all(
            size == given
            for tensor, shape, axes in zip(program.inputs, shapes, self._axes.inputs, strict=True)
            for size, given, name in zip(tensor.shape, shape, axes, strict=True)
            if name is None
        )

    def _part(self, program: Program, sizes: Mapping[str, int]) -> Part:
        return Part(program, tuple(resized(tensor, axes, sizes) for tensor, axes in self._axes.of_outputs(program)))

    def _outputs(self, program: Program, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        return tuple(replace(t, shape=resized(t, axes, sizes)) for t, axes in self._axes.of_outputs(program))


def _indices(split: Sequence[Sequence[bool]], taken: slice) -> list[Index]:
    """For each tensor, those elements of the axes that are split, and all of the others."""
    return [tuple([taken if is_split else _WHOLE for is_split in axes]) for axes in split]


def _volume(program: Program) -> tuple[int, ...]:
    return prod(size for _, size in program.profile), *(size for _, size in program.profile)
