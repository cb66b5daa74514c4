"""Calls of sizes that no program is for: padded to the smallest program that covers them, or split into several runs.

`Program.fits` holds what the compiler found out about each dimension. An axis has a named dimension if its size
equals that dimension's in every program of the entry.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Self, TypeAlias

from nimblert.plan import Fit, Program, Tensor, listed
from nimblert.plan.dimensions import Axes, Shape, Shapes, profile_text, resized

Index: TypeAlias = tuple[slice, ...]

_KEPT = 256
"""The most combinations of shapes whose runs an entry remembers."""

_WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a program within a call. ``shapes`` are those of the valid outputs; what is beyond them is padding.

    They are None where the inputs have the program's own shapes.
    """

    program: Program
    shapes: tuple[Shape, ...] | None


Run: TypeAlias = tuple[Part, Sequence[Index], Sequence[Index]]
"""A run with the elements of the inputs that it takes, and of the outputs that it gives."""


@dataclass(frozen=True, slots=True)
class Served:
    """The runs of a call, ``count`` of them, and the outputs of all together. All but the ``last`` are ``first``.

    Each takes ``step`` of a dimension, and the last the rest; a single run takes all. ``input_axes`` and
    ``output_axes`` tell of each axis whether it has that dimension.
    """

    count: int
    first: Part
    last: Part
    outputs: tuple[Tensor, ...]
    step: int = 0
    input_axes: Sequence[Sequence[bool]] = ()
    output_axes: Sequence[Sequence[bool]] = ()

    @classmethod
    def exactly(cls, program: Program) -> Self:
        """Return one run of a program, on inputs of its own shapes."""
        part = Part(program, None)
        return cls(1, part, part, program.outputs)

    @property
    def runs(self) -> Iterator[Run]:
        """The runs, made one by one, with the elements of the inputs that each takes, and of the outputs."""
        for number in range(self.count):
            taken = slice(number * self.step, (number + 1) * self.step)
            part = self.first if number + 1 < self.count else self.last
            yield part, _indices(self.input_axes, taken), _indices(self.output_axes, taken)

    @property
    def exact(self) -> Program | None:
        """The program whose inputs have just these shapes, if there is one."""
        return self.last.program if self.last.shapes is None else None


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
            return Served(1, part, part, self._outputs(program, sizes))
        return next(filter(None, (self._split(shapes, sizes, name) for name in sizes)), None)

    def _split(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], name: str) -> Served | None:
        """Return runs for the largest part of a dimension, and one for the rest; None where no programs do."""
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
        return Served(count, first, last, self._outputs(largest, sizes), step, inputs, outputs)

    def _cover(self, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None = None) -> Program | None:
        """Return the smallest program for these sizes."""
        return next((p for p in self._programs if self._covers(p, shapes, sizes, split)), None)

    def _covers(
        self, program: Program, shapes: tuple[Shape, ...], sizes: Mapping[str, int], split: str | None
    ) -> bool:
        """Return whether a program serves these sizes and the other axes; of dimension ``split`` it is a part."""
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
    """Return for each tensor an index of the elements ``taken`` along split axes, and of all along the others."""
    return [tuple([taken if is_split else _WHOLE for is_split in axes]) for axes in split]


def _volume(program: Program) -> tuple[int, ...]:
    return prod(size for _, size in program.profile), *(size for _, size in program.profile)


_SHOWN = 8
"""The most items that a message lists."""


def why_unserved(entry: str, programs: Sequence[Program], shapes: Shapes) -> str:
    """Explain why no program of an entry serves inputs of these shapes in one run, and what to give instead."""
    axes = Axes(programs)
    return (
        _wrong_shape(programs, axes, shapes)
        or _disagreement(programs, axes, shapes)
        or _wrong_size(entry, programs, axes, shapes)
        or f"inputs of the shapes {_listed(programs[0], shapes)}: {entry!r} has programs for {_profiles(programs)}"
    )


def _wrong_shape(programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """Describe the first input with a wrong number of axes, or a wrong size of an axis without a name."""
    for i, (shape, of) in enumerate(zip(shapes, axes.inputs, strict=True)):
        sizes = list(zip(*(program.inputs[i].shape for program in programs), strict=True))
        if len(shape) != len(of) or any(not d and n not in known for n, d, known in zip(shape, of, sizes, strict=True)):
            expected = [d or " or ".join(_some(known)) for d, known in zip(of, sizes, strict=True)]
            comma = "," * (len(expected) == 1)
            return f"input {programs[0].inputs[i].name!r}: shape {shape}, expected ({', '.join(expected)}{comma})"
    return None


def _disagreement(programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """Return the first two axes of the same dimension and of different sizes."""
    found: dict[str, tuple[int, str]] = {}
    for dimension, size, name, axis in _given(programs[0], axes, shapes):
        other, where = found.setdefault(dimension, (size, f"axis {axis} of input {name!r}"))
        if size != other:
            here = f"input {name!r}: {dimension!r} is {size} at axis {axis}"
            return f"{here}, and {other} at {where}: give both the same size"
    return None


def _wrong_size(entry: str, programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """Describe the first dimension whose size no program covers, if possible one that cannot be split."""
    split: dict[str, str] = {}
    for dimension, size, name, axis in _given(programs[0], axes, shapes):
        fits = _fits(programs, dimension)
        most = max((n for n, fit in fits.items() if fit is not Fit.EXACT), default=0)
        if size in fits or 0 < size < most:
            continue
        remedy = f"1 to {most}" if most else "one of these"
        if not most and size > 0:
            remedy += f", or compile with --dim {dimension}={size} among them"
        sentence = (
            f"input {name!r}: {dimension!r} is {size} at axis {axis}, and {entry!r} has programs for "
            f"{dimension}={', '.join(_some(fits))}: give {remedy}"
        )
        if size < 1 or Fit.SPLIT not in fits.values():
            return sentence
        split.setdefault(dimension, sentence)
    first = next(iter(split.values()), None)
    return f"{first}, as calls are split along one dimension alone" if len(split) > 1 else first


def _given(program: Program, axes: Axes, shapes: Shapes) -> Iterator[tuple[str, int, str, int]]:
    """Yield each dimension, with its size, at each axis of each input: by the input's name, and the axis."""
    for (tensor, of), shape in zip(axes.of_inputs(program), shapes, strict=True):
        for axis, (dimension, size) in enumerate(zip(of, shape, strict=True)):
            if dimension is not None:
                yield dimension, size, tensor.name, axis


def _fits(programs: Iterable[Program], dimension: str) -> dict[int, Fit]:
    """Return the sizes of a dimension that there are programs for, and the best fit of those of each size."""
    found: dict[int, Fit] = {}
    for program in programs:
        sizes = dict(program.profile)
        size, fit = sizes[dimension], dict(zip(sizes, program.fits, strict=False)).get(dimension, Fit.EXACT)
        found[size] = max(fit, found.get(size, fit))
    return found


def _some(sizes: Iterable[int]) -> list[str]:
    """Return these sizes, ascending; of many the first ones and the last."""
    texts = [str(size) for size in sorted(set(sizes))]
    return texts if len(texts) <= _SHOWN else [*texts[: _SHOWN - 2], "...", texts[-1]]


def _listed(program: Program, shapes: Sequence[Shape]) -> str:
    """Return the first inputs of a program with these shapes."""
    return listed([f"{tensor.name!r}: {shape}" for tensor, shape in zip(program.inputs, shapes, strict=True)])


def _profiles(programs: Sequence[Program]) -> str:
    """Return the first programs, each by its profile and the shapes of its inputs."""
    texts = [f"{profile_text(p.profile)} ({_listed(p, [t.shape for t in p.inputs])})" for p in programs[:_SHOWN]]
    more = len(programs) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more else "")
