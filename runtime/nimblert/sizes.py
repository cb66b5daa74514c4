"""Calls of sizes that no program is for: padded to the smallest program that covers them, or run part after part.

What the compiler found out about a dimension stands in `Program.fits`; which axes have that dimension
follows from the shapes: an axis whose size is the dimension's in every program of the entry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeAlias

from nimblert.plan import Fit, Launch, Memcpy, Memset, Program, Region, Tensor

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]

_KEPT = 256
"""How many combinations of shapes an entry remembers the programs for."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of a program within a call: on those elements of the inputs, for these of the outputs.

    ``shapes`` are those of the outputs; what lies beyond is of no meaning.
    """

    program: Program
    inputs: tuple[Index, ...]
    outputs: tuple[Index, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """The runs of a call, and the outputs of all of them together."""

    parts: tuple[Part, ...]
    outputs: tuple[Tensor, ...]


class Sizes:
    """The sizes that the programs of an entry serve; in ``programs`` `problems` finds nothing."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = sorted(programs, key=_volume)
        self._axes = Axes(programs)
        self.serve = lru_cache(_KEPT)(self._serve)
        """The runs of a call with inputs of these shapes; None where no programs serve it."""

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
        """Runs for one part of a dimension after the other; none where they would not serve all of it."""
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
        """The program that serves the largest part of a dimension."""
        for program in sorted(self._programs, key=lambda program: -dict(program.profile)[name]):
            size = dict(program.profile)[name]
            if size <= sizes[name] and self._covers(program, shapes, {**sizes, name: size}, split=name):
                return program
        return None

    def _cover(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None = None) -> Program | None:
        """The smallest program that serves these sizes."""
        return next((p for p in self._programs if self._covers(p, shapes, sizes, split)), None)

    def _covers(
        self, program: Program, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None
    ) -> bool:
        """Whether a program serves these sizes and the rest of the shapes; of ``split``, these are parts."""
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
            shapes = [_resized(tensor, axes, part) for tensor, axes in self._axes.of_outputs(program)]
            parts.append(
                Part(
                    program=program,
                    inputs=tuple(_index(t, axes, part, starts) for t, axes in self._axes.of_inputs(program)),
                    outputs=tuple(_index(t, axes, part, starts) for t, axes in self._axes.of_outputs(program)),
                    shapes=tuple(shapes),
                )
            )
        outputs = self._axes.of_outputs(runs[0][0])
        return Served(tuple(parts), tuple(replace(t, shape=_resized(t, axes, sizes)) for t, axes in outputs))


_Run: TypeAlias = tuple[Program, Mapping[str, int], Mapping[str, int]]
"""A program, how much it is given of each dimension, and from where on."""


def _resized(tensor: Tensor, axes: Sequence[str | None], sizes: Mapping[str, int]) -> Shape:
    return tuple(
        size if name is None else sizes.get(name, size) for size, name in zip(tensor.shape, axes, strict=True)
    )


def _index(
    tensor: Tensor, axes: Sequence[str | None], sizes: Mapping[str, int], starts: Mapping[str, int]
) -> Index:
    begins = (0 if name is None else starts.get(name, 0) for name in axes)
    return tuple(slice(begin, begin + n) for begin, n in zip(begins, _resized(tensor, axes, sizes), strict=True))


def _volume(program: Program) -> tuple[int, ...]:
    return prod(size for _, size in program.profile), *(size for _, size in program.profile)


class Axes:
    """The dimension of each axis of an entry's ``inputs`` and ``outputs``; None for one of no dimension.

    ``bound`` are the dimensions on which an axis depends in another way, such as twice the size.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._profiles = [dict(program.profile) for program in programs]
        self.bound: set[str] = set()
        self.inputs = self._sides([program.inputs for program in programs])
        self.outputs = self._sides([program.outputs for program in programs])
        self._static = [tensor.shape for tensor in programs[0].inputs]

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int] | None:
        """The sizes of the dimensions that inputs of these shapes have; None where they contradict each other."""
        sizes: dict[str, int] = {}
        for shape, axes in zip(shapes, self.inputs, strict=True):
            if len(shape) != len(axes):
                return None
            for size, name in zip(shape, axes, strict=True):
                if name is not None and sizes.setdefault(name, size) != size:
                    return None
        return sizes

    def resized_inputs(self, program: Program, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        """The inputs of a program with other sizes of the dimensions."""
        return tuple(replace(t, shape=_resized(t, axes, sizes)) for t, axes in self.of_inputs(program))

    def of_inputs(self, program: Program) -> "zip[tuple[Tensor, tuple[str | None, ...]]]":
        """Each input of a program with the dimensions of its axes."""
        return zip(program.inputs, self.inputs, strict=True)

    def of_outputs(self, program: Program) -> "zip[tuple[Tensor, tuple[str | None, ...]]]":
        """Each output of a program with the dimensions of its axes."""
        return zip(program.outputs, self.outputs, strict=True)

    def _sides(self, sides: Sequence[Sequence[Tensor]]) -> tuple[tuple[str | None, ...], ...]:
        shapes = (zip(*(tensor.shape for tensor in same), strict=True) for same in zip(*sides, strict=True))
        return tuple(tuple(map(self._dimension, axes)) for axes in shapes)

    def _dimension(self, sizes: Shape) -> str | None:
        """The dimension of an axis with this size in each program."""
        if len(set(sizes)) == 1:
            return None
        names = list(self._profiles[0])
        matching = [n for n in names if all(p[n] == size for p, size in zip(self._profiles, sizes, strict=True))]
        if len(matching) == 1:
            return matching[0]
        self.bound.update(self._causes(sizes) or names)
        return None

    def _causes(self, sizes: Shape) -> set[str]:
        """The dimensions in which alone two programs differ that have another size there."""
        causes = set()
        for name in self._profiles[0]:
            seen: dict[frozenset[tuple[str, int]], int] = {}
            for profile, size in zip(self._profiles, sizes, strict=True):
                others = frozenset(profile.items() - {(name, profile[name])})
                if seen.setdefault(others, size) != size:
                    causes.add(name)
        return causes


def problems(programs: Mapping[int, Program]) -> Iterator[str]:
    """Yield a sentence for each fit that the shapes of an entry contradict; its programs are by index of the plan.

    They agree in their tensors and in the names of their profiles.
    """
    if not any(program.fits for program in programs.values()):
        return
    axes = Axes(list(programs.values()))
    taken, given = ({name for of in side for name in of} for side in (axes.inputs, axes.outputs))
    everywhere = {name for name in given if all(name in of for of in axes.outputs)}
    for i, program in programs.items():
        path = f"programs[{i}].fits"
        if len(program.fits) != len(program.profile):
            yield f"{path}: {len(program.fits)}, expected one for each of {len(program.profile)} dimensions"
            continue
        for (name, size), fit in zip(program.profile, program.fits, strict=True):
            if fit is Fit.EXACT:
                continue
            if name not in taken or name in axes.bound or size < 1:
                yield f"{path}: {name}={size} is {fit.name}, and no axis of an input is {name!r} in all programs alike"
            elif fit is Fit.SPLIT and name not in everywhere:
                yield f"{path}: {name!r} is SPLIT, and an output has no axis of it"
            elif writes_state(program):
                yield f"{path}: {name!r} is {fit.name}, and the program writes the state"


def writes_state(program: Program) -> bool:
    """Whether a run changes the state, which later runs read: it may not hold what stands for nothing."""
    return any(region is Region.STATE for region in _written(program))


def _written(program: Program) -> Iterable[Region]:
    for tensor in program.inputs:
        yield tensor.pointer.region
    for command in program.commands:
        match command:
            case Launch():
                yield from (access.pointer.region for access in command.writes)
            case Memcpy() | Memset():
                yield command.dst.region
