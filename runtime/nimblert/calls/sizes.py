"""Calls of sizes that no program is for: padded to the smallest program that covers them, or split into several runs.

`Program.fits` holds what the compiler found out about each dimension. An axis has a named dimension if its size
equals that dimension's in every program of the entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeAlias

from nimblert.dimensions import Axes, Shape, resized
from nimblert.plan import Fit, Program, Tensor

Index: TypeAlias = tuple[slice, ...]

_KEPT = 256
"""The most combinations of shapes whose runs an entry remembers."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of a program within a call: the elements of the inputs that it takes, and of the outputs that it gives.

    ``shapes`` are those of the valid outputs; elements beyond them are padding.
    """

    program: Program
    inputs: tuple[Index, ...]
    outputs: tuple[Index, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """The runs of a call, and the outputs of all together."""

    parts: tuple[Part, ...]
    outputs: tuple[Tensor, ...]


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
        whole = self._cover(shapes, sizes)
        if whole is not None:
            return self._served(sizes, [(whole, sizes, {})])
        for name in sizes:
            if runs := self._split(shapes, sizes, name):
                return self._served(sizes, runs)
        return None

    def _split(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], name: str) -> "list[_Run]":
        """Runs for consecutive parts of a dimension; none where they would not cover it."""
        runs: list[_Run] = []
        start = 0
        while start < sizes[name]:
            left = {**sizes, name: sizes[name] - start}
            program = self._cover(shapes, left, split=name)
            if program is None:
                program = self._largest(shapes, left, name)
                if program is None:
                    return []
                left[name] = dict(program.profile)[name]
            runs.append((program, left, {name: start}))
            start += left[name]
        return runs

    def _largest(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], name: str) -> Program | None:
        """The program for the largest part of a dimension."""
        for program in sorted(self._programs, key=lambda program: -dict(program.profile)[name]):
            size = dict(program.profile)[name]
            if size <= sizes[name] and self._covers(program, shapes, {**sizes, name: size}, split=name):
                return program
        return None

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

    def _served(self, sizes: Mapping[str, int], runs: "Sequence[_Run]") -> Served:
        parts = []
        for program, part, starts in runs:
            shapes = [resized(tensor, axes, part) for tensor, axes in self._axes.of_outputs(program)]
            parts.append(
                Part(
                    program=program,
                    inputs=tuple(_index(t, axes, part, starts) for t, axes in self._axes.of_inputs(program)),
                    outputs=tuple(_index(t, axes, part, starts) for t, axes in self._axes.of_outputs(program)),
                    shapes=tuple(shapes),
                )
            )
        outputs = self._axes.of_outputs(runs[0][0])
        return Served(tuple(parts), tuple(replace(t, shape=resized(t, axes, sizes)) for t, axes in outputs))


_Run: TypeAlias = tuple[Program, Mapping[str, int], Mapping[str, int]]
"""A program, the size of its part in each dimension, and where the part starts."""


def _index(
    tensor: Tensor, axes: Sequence[str | None], sizes: Mapping[str, int], starts: Mapping[str, int]
) -> Index:
    begins = (0 if name is None else starts.get(name, 0) for name in axes)
    return tuple(slice(begin, begin + n) for begin, n in zip(begins, resized(tensor, axes, sizes), strict=True))


def _volume(program: Program) -> tuple[int, ...]:
    return prod(size for _, size in program.profile), *(size for _, size in program.profile)
