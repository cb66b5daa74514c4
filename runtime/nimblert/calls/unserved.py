"""Why no program of an entry takes inputs of some shapes, in a sentence that stays short for many programs."""

from collections.abc import Iterable, Iterator, Sequence

from nimblert.dimensions import Axes, Shape, Shapes, profile_text
from nimblert.plan import Fit, Program, listed

_SHOWN = 8
"""The most items that a message lists."""


def why_unserved(entry: str, programs: Sequence[Program], shapes: Shapes) -> str:
    """What keeps every program of an entry from serving inputs of these shapes in one run, and what to give instead."""
    axes = Axes(programs)
    return (
        _wrong_shape(programs, axes, shapes)
        or _disagreement(programs, axes, shapes)
        or _wrong_size(entry, programs, axes, shapes)
        or f"inputs of the shapes {_listed(programs[0], shapes)}: {entry!r} has programs for {_profiles(programs)}"
    )


def _wrong_shape(programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """The first input with other axes than its programs have, or with another size where these have no dimension."""
    for i, (shape, of) in enumerate(zip(shapes, axes.inputs, strict=True)):
        sizes = list(zip(*(program.inputs[i].shape for program in programs), strict=True))
        if len(shape) != len(of) or any(not d and n not in known for n, d, known in zip(shape, of, sizes, strict=True)):
            expected = [d or " or ".join(_some(known)) for d, known in zip(of, sizes, strict=True)]
            comma = "," * (len(expected) == 1)
            return f"input {programs[0].inputs[i].name!r}: shape {shape}, expected ({', '.join(expected)}{comma})"
    return None


def _disagreement(programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """The first two axes of the same dimension and of different sizes."""
    found: dict[str, tuple[int, str]] = {}
    for dimension, size, name, axis in _given(programs[0], axes, shapes):
        other, where = found.setdefault(dimension, (size, f"axis {axis} of input {name!r}"))
        if size != other:
            here = f"input {name!r}: {dimension!r} is {size} at axis {axis}"
            return f"{here}, and {other} at {where}: give both the same size"
    return None


def _wrong_size(entry: str, programs: Sequence[Program], axes: Axes, shapes: Shapes) -> str | None:
    """The first dimension of a size that no program covers; if possible one that no call could be split along."""
    split: dict[str, str] = {}
    for dimension, size, name, axis in _given(programs[0], axes, shapes):
        fits = _fits(programs, dimension)
        most = max((n for n, fit in fits.items() if fit is not Fit.EXACT), default=0)
        if size in fits or 0 < size < most:
            continue
        way = f"1 to {most}" if most else "one of these"
        sentence = (
            f"input {name!r}: {dimension!r} is {size} at axis {axis}, and {entry!r} has programs for "
            f"{dimension}={', '.join(_some(fits))}: give {way}"
        )
        if size < 1 or Fit.SPLIT not in fits.values():
            return sentence
        split.setdefault(dimension, sentence)
    first = next(iter(split.values()), None)
    return f"{first}, as calls are split along one dimension alone" if len(split) > 1 else first


def _given(program: Program, axes: Axes, shapes: Shapes) -> Iterator[tuple[str, int, str, int]]:
    """Each dimension, with its size, at each axis of each input: by the input's name, and the axis."""
    for (tensor, of), shape in zip(axes.of_inputs(program), shapes, strict=True):
        for axis, (dimension, size) in enumerate(zip(of, shape, strict=True)):
            if dimension is not None:
                yield dimension, size, tensor.name, axis


def _fits(programs: Iterable[Program], dimension: str) -> dict[int, Fit]:
    """The sizes of a dimension that there are programs for, and the best fit of those of each size."""
    found: dict[int, Fit] = {}
    for program in programs:
        sizes = dict(program.profile)
        size, fit = sizes[dimension], dict(zip(sizes, program.fits, strict=False)).get(dimension, Fit.EXACT)
        found[size] = max(fit, found.get(size, fit))
    return found


def _some(sizes: Iterable[int]) -> list[str]:
    """These sizes, ascending; of many the first ones and the last."""
    texts = [str(size) for size in sorted(set(sizes))]
    return texts if len(texts) <= _SHOWN else [*texts[: _SHOWN - 2], "...", texts[-1]]


def _listed(program: Program, shapes: Sequence[Shape]) -> str:
    """The first inputs of a program with these shapes."""
    return listed([f"{tensor.name!r}: {shape}" for tensor, shape in zip(program.inputs, shapes, strict=True)])


def _profiles(programs: Sequence[Program]) -> str:
    """The first programs, each by its profile and the shapes of its inputs."""
    texts = [f"{profile_text(p.profile)} ({_listed(p, [t.shape for t in p.inputs])})" for p in programs[:_SHOWN]]
    more = len(programs) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more else "")
