"""Determine by test runs which calls of other sizes the programs of a plan can serve.

A dimension may be padded if the elements beyond a call's own, whatever they hold, change no bit of its
outputs, and if programs of different sizes agree on the elements that they share. It may be split if that
also holds for the elements before a call's own, among values of any magnitude, and if it is one axis of each
output. Both must hold for every program of an entry: a program for a single row cannot show how rows affect
each other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from nimblec.base.difference import difference, numbers
from nimblec.base.errors import CompileError
from nimblert import golden
from nimblert.arrays import layouts
from nimblert.arrays.layouts import numpy_dtype
from nimblert.check.program_rules import writes_state
from nimblert.errors import InputError
from nimblert.executable import Executable
from nimblert.plan import Fit, Plan, Program, Target
from nimblert.plan.dimensions import Axes

_SEED = 0
_TOLERANCE = {Target.CPU: 1e-4, Target.CUDA: 1e-2}
"""Of an output's largest magnitude: programs of different sizes may add up in another order, and round to TF32."""

_LARGE = {2: 10.0, 4: 1e3, 8: 1e3}
"""A factor for random padding, by bytes of a number: sums over it must be noticed, and must not overflow."""

_EXTREME = {2: (1e2, 1e3), 4: (1e6, 1e30), 8: (1e6, 1e30)}
"""Factors for random inputs that may overflow, by bytes of a number: a maximum over them must be noticed."""

_LARGE_INTEGER = 1000
"""Above the pixel values of most images, and below the number of rows of most tables."""

Arrays: TypeAlias = Mapping[str, np.ndarray]
Sizes: TypeAlias = Mapping[str, int]
Axis: TypeAlias = Sequence[str | None]


def find_fits(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the fits of its programs, and notes about them for the user."""
    found: dict[str, tuple[Fit, ...]] = {}
    notes: list[str] = []
    with Executable(plan) as executable:
        for programs in _sized(plan):
            fits = _Trial(executable, programs).common_fits()
            found |= {program.name: tuple(fits[name] for name, _ in program.profile) for program in programs}
            notes += (f"{name}: {_note(plan, programs, name, fit)}" for name, fit in fits.items())
    proved = tuple(replace(p, fits=found.get(p.name, ())) for p in plan.programs)
    return replace(plan, programs=proved), tuple(notes)


def mark_masks(plan: Plan, masks: Collection[str]) -> Plan:
    """The plan with the inputs called ``masks`` marked as such.

    Raises CompileError for a name that is not an input with a dimension of several sizes.
    """
    if not masks:
        return plan
    programs = [program for program in plan.programs if program.profile]
    axes = Axes(programs)
    dimensions = {tensor.name: any(of) for tensor, of in axes.of_inputs(programs[0])}
    for mask in masks:
        if mask not in dimensions:
            raise CompileError(f"--pad-mask {mask}: is not one of the model's inputs {list(dimensions)}")
        if not dimensions[mask]:
            raise CompileError(f"--pad-mask {mask}: has no dimension of several sizes: give one by --dim NAME=1,8")
    marked = (
        replace(program, inputs=tuple(replace(t, mask=t.name in masks) for t in program.inputs))
        for program in plan.programs
    )
    return replace(plan, programs=tuple(marked))


def differences(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each fit of a program that runs on this machine contradict."""
    with Executable(plan) as executable:
        for programs in _sized(plan):
            common = _Trial(executable, programs).common_fits()
            for program in programs:
                for (name, _), claimed in zip(program.profile, program.fits, strict=False):
                    if claimed > common[name]:
                        yield f"program {program.name!r}: {name} is {claimed.name}, and runs show {common[name].name}"


def _note(plan: Plan, programs: Sequence[Program], name: str, fit: Fit) -> str:
    """What calls of other sizes get, and where they get nothing, why and what may help."""
    refused = "calls of other sizes than the plan's are refused, since"
    if any(writes_state(plan.state, program) for program in programs):
        return f"{refused} a run writes the state"
    if fit is not Fit.EXACT:
        return _MEANING[fit]
    lacking = [t.name for t, of in Axes(programs).of_outputs(programs[0]) if name not in of]
    if lacking and not any(t.mask for t in programs[0].inputs):
        return f"{refused} output {lacking[0]!r} has no axis of it, and no input is a mask: --pad-mask names one"
    integers = [t.name for t in programs[0].inputs if t.sample_range is None and numpy_dtype(t.dtype).kind in "iu"]
    drawn = f" where {integers[0]!r} is drawn from 0 and 1: --example gives its range" if integers else ""
    return f"{refused} padding changes the results{drawn}"


def _sized(plan: Plan) -> Iterator[tuple[Program, ...]]:
    """The programs of each entry for several sizes."""
    return (programs for programs in plan.entries.values() if programs[0].profile)


_MEANING = {
    Fit.PADDED: "calls of sizes between are padded",
    Fit.SPLIT: "calls of sizes between are padded, larger ones split",
}


class _Trial:
    """Runs of the programs of one entry."""

    def __init__(self, executable: Executable, programs: Sequence[Program]) -> None:
        self._executable = executable
        self._programs = programs
        self._axes = Axes(programs)
        self._masks = {tensor.name for tensor in programs[0].inputs if tensor.mask}
        target = executable.plan.target
        self._tolerance = _TOLERANCE[target]
        self._may_fail = target is Target.CPU  # on a GPU, reading past a table ends the process

    def common_fits(self) -> dict[str, Fit]:
        """The calls that all programs serve, by dimension."""
        each = [self._fits(program) for program in self._programs]
        return {name: min(fits[name] for fits in each) for name in each[0]}

    def _fits(self, program: Program) -> dict[str, Fit]:
        """The calls that one program can serve, according to its runs, by dimension."""
        sizes = dict(program.profile)
        if writes_state(self._executable.plan.state, program):
            return dict.fromkeys(sizes, Fit.EXACT)
        found = {name: self._fit(program, name) for name in sizes}
        padded: dict[str, int] = {}
        for name, fit in found.items():
            if fit is not Fit.EXACT:
                together = {**padded, name: max(sizes[name] - 1, 1)}
                if padded and not self._holds(program, partial(self._is_alone, program, stops=together)):
                    found[name] = Fit.EXACT
                else:
                    padded = together
        return found

    def _fit(self, program: Program, name: str) -> Fit:
        """The calls with another size of one dimension that a program can serve."""
        size, others = dict(program.profile)[name], self._neighbours(program, name)
        given = [of.count(name) for of in self._axes.outputs]
        is_given = all(given)
        if not size or not others or name in self._axes.bound or not (is_given or self._is_masked(name)):
            return Fit.EXACT
        below = max((dict(p.profile)[name] for p in others), key=lambda n: (n < size, n))
        used = {below + 1, size - 1} if below < size else {1, size - 1}
        stops = [{name: n} for n in used - {0, size}]
        if not self._holds(program, lambda base: all(self._is_alone(program, base, stop) for stop in stops)):
            return Fit.EXACT
        if not all(self._agree(program, other, name, 0) for other in others):
            return Fit.EXACT
        if set(given) != {1} or not self._holds(program, partial(self._is_alone_anywhere, program, name=name)):
            return Fit.PADDED
        agree = all(self._agree(program, other, name, start) for other in others for start in (1, None))
        return Fit.SPLIT if agree else Fit.PADDED

    def _is_masked(self, name: str) -> bool:
        sides = zip(self._programs[0].inputs, self._axes.inputs, strict=True)
        return any(name in of for tensor, of in sides if tensor.name in self._masks)

    def _neighbours(self, program: Program, name: str) -> list[Program]:
        """The programs of the next size below and above in one dimension, and of the same sizes in all others."""
        profile = dict(program.profile)
        row = [p for p in self._programs if {**dict(p.profile), name: 0} == {**profile, name: 0}]
        row.sort(key=lambda p: dict(p.profile)[name])
        at = row.index(program)
        return [other for other in row[max(at - 1, 0) : at + 2] if other is not program]

    def _is_alone(self, program: Program, base: Arrays, stops: Sizes) -> bool:
        """Whether elements beyond ``stops`` leave the outputs of ``base`` before them unchanged, bit for bit."""
        filled = self._filled(program)
        masks = {name: filled[name] for name in self._masks}
        rests = (filled, *({**rest, **masks} for rest in self._garbage(program)))
        merged = [self._merged(program, base, rest, {}, stops) for rest in rests]
        if not self._same_box(program, merged, {}, stops):
            return False
        if not self._same_between_ends(program, filled, {}, stops):
            return False
        return self._bears(program, base, filled, {}, stops)

    def _is_alone_anywhere(self, program: Program, base: Arrays, name: str) -> bool:
        """Whether other elements leave the outputs of the first one and of the last one of ``base`` unchanged."""
        last = {name: dict(program.profile)[name] - 1}
        return (
            self._is_alone_at_end(program, base, last)
            and self._is_alone_amid(program, base, {}, {name: 1})
            and self._is_alone_amid(program, base, last, {})
        )

    def _is_alone_at_end(self, program: Program, base: Arrays, starts: Sizes) -> bool:
        """Whether elements before ``starts`` leave the outputs from there on unchanged, bit for bit."""
        merged = [self._merged(program, base, rest, starts, {}) for rest in (base, *self._garbage(program))]
        if not self._same_box(program, merged, starts, {}):
            return False
        if not self._same_between_ends(program, base, starts, {}):
            return False
        return self._bears(program, base, base, starts, {})

    def _is_alone_amid(self, program: Program, base: Arrays, starts: Sizes, stops: Sizes) -> bool:
        """Whether values of any magnitude outside of the box leave its outputs unchanged.

        A run that refuses such integers, as indices, shows nothing.
        """
        expected = self._run(program, base, starts, stops)
        for rest in self._extremes(program):
            try:
                found = self._run(program, self._merged(program, base, rest, starts, stops), starts, stops)
            except InputError:
                continue
            if not _same(program, expected, found):
                return False
        return True

    def _holds(self, program: Program, check: Callable[[Arrays], bool]) -> bool:
        """Whether a check of random inputs succeeds, also with others in place of those without a dimension.

        Where the program refuses these, as indices or lengths, or gives numbers that are not finite, they show nothing.
        """
        drawn = self._drawn(program, _SEED)
        if not check(drawn):
            return False
        fixed = {
            tensor.name
            for tensor, of in zip(program.inputs, self._axes.inputs, strict=True)
            if not any(of) and tensor.name not in self._masks
        }
        largest = max(size for _, size in program.profile)
        for most in (largest, _LARGE_INTEGER) if fixed else ():
            others = {name: _opposite(drawn[name]) for name in fixed}
            others |= {name: array for name, array in self._wide(program, most).items() if name in fixed}
            given = {**drawn, **others}
            try:
                shows = all(map(_is_finite, self._run(program, given, {}, {})))
                if shows and not check(given):
                    return False
            except InputError:
                continue
        return True

    def _extremes(self, program: Program) -> Iterator[Arrays]:
        """Inputs of magnitudes that may overflow; integers only where no example bounds them."""
        drawn = self._drawn(program, _SEED + 3)
        for i in range(2):
            scaled = {name: _scaled(a, _EXTREME.get(a.dtype.itemsize, (1, 1))[i]) for name, a in drawn.items()}
            yield {**scaled, **self._wide(program, most=None)}

    def _same_box(self, program: Program, given: Sequence[Arrays], starts: Sizes, stops: Sizes) -> bool:
        """Whether runs on all of these give equal and finite outputs in the box."""
        first, *others = (self._run(program, arrays, starts, stops) for arrays in given)
        return all(map(_is_finite, first)) and all(_same(program, first, other) for other in others)

    def _same_between_ends(self, program: Program, rest: Arrays, starts: Sizes, stops: Sizes) -> bool:
        """Whether a box of the smallest integers and bools has the same outputs in these, the largest and ``rest``.

        So must a box of the largest. A maximum or minimum over all of them shows there, which random ones reach
        anywhere. Outputs that are not finite show nothing.
        """
        masks, ends = {name: rest[name] for name in self._masks}, self._ends(program)
        rests = (rest, *({**end, **masks} for end in ends))
        for box in ends:
            given = (self._merged(program, box, other, starts, stops) for other in rests)
            first, *others = (self._run(program, arrays, starts, stops) for arrays in given)
            if all(map(_is_finite, first)) and not all(_same(program, first, other) for other in others):
                return False
        return True

    def _ends(self, program: Program) -> list[Arrays]:
        """Inputs whose integers and bools are all as small as they come, and as large; none where there are no such."""
        drawn = self._drawn(program, _SEED)
        ranges = {
            tensor.name: tensor.sample_range or (0, 1)
            for tensor in program.inputs
            if numpy_dtype(tensor.dtype).kind in "biu" and tensor.name not in self._masks
        }
        if not ranges:
            return []
        return [drawn | {name: np.full_like(drawn[name], ends[i]) for name, ends in ranges.items()} for i in (0, 1)]

    def _bears(self, program: Program, base: Arrays, rest: Arrays, starts: Sizes, stops: Sizes) -> bool:
        """Whether integers of any size in the ``rest`` leave the outputs unchanged.

        A model that uses them as indices may refuse them, which shows nothing.
        """
        wide = self._wide(program)
        if not wide:
            return True
        given = [self._merged(program, base, other, starts, stops) for other in (rest, {**rest, **wide})]
        try:
            return self._same_box(program, given, starts, stops)
        except InputError:
            return True

    def _wide(self, program: Program, most: int | None = _LARGE_INTEGER) -> dict[str, np.ndarray]:
        """Integers from 0 to ``most``, or any, for the inputs that no example bounds and that may have them."""
        drawn, random = {}, np.random.default_rng(_SEED)
        for tensor in program.inputs:
            dtype = numpy_dtype(tensor.dtype)
            is_free = dtype.kind in "iu" and tensor.sample_range is None and tensor.name not in self._masks
            if is_free and (dtype.itemsize == 1 or self._may_fail):
                ends = np.iinfo(dtype)
                low, high = (ends.min, ends.max) if most is None else (0, min(ends.max, most))
                drawn[tensor.name] = random.integers(low, high, tensor.shape, dtype, endpoint=True)
        return drawn

    def _agree(self, one: Program, other: Program, name: str, start: int | None) -> bool:
        """Whether the smaller of two programs agrees with elements of the larger, from ``start`` or the last ones."""
        small, large = sorted((one, other), key=lambda p: dict(p.profile)[name])
        count, total = dict(small.profile)[name], dict(large.profile)[name]
        starts = {name: total - count if start is None else start}
        stops = {name: starts[name] + count}
        for base in self._bases(large):
            whole = base if start != 0 else self._merged(large, base, self._filled(large), starts, stops)
            part = {
                tensor.name: base[tensor.name][_box(of, starts, stops)]
                for tensor, of in zip(large.inputs, self._axes.inputs, strict=True)
            }
            expected, found = self._run(small, part, {}, {}), self._run(large, whole, starts, stops)
            if not all(map(_is_finite, expected)):
                return False
            if not all(difference(e, f).within(self._tolerance) for e, f in zip(expected, found, strict=True)):
                return False
        return True

    def _bases(self, program: Program) -> Iterator[dict[str, np.ndarray]]:
        """Inputs for a comparison; with masks also all positive and all negative, so that masked zeros are extremes."""
        drawn = self._drawn(program, _SEED)
        yield drawn
        if self._masks:
            for sign in (1, -1):
                away = {name: _away_from_zero(array, sign) for name, array in drawn.items()}
                yield {**away, **{name: drawn[name] for name in self._masks}}

    def _merged(self, program: Program, base: Arrays, rest: Arrays, starts: Sizes, stops: Sizes) -> Arrays:
        """The ``rest`` with a box of the ``base`` in it."""
        # np.array also makes an array of a numpy scalar.
        merged = {name: np.array(array) for name, array in rest.items()}
        for tensor, of in zip(program.inputs, self._axes.inputs, strict=True):
            box = _box(of, starts, stops)
            merged[tensor.name][box] = base[tensor.name][box]
        return merged

    def _run(self, program: Program, arrays: Arrays, starts: Sizes, stops: Sizes) -> list[np.ndarray]:
        """A box of each output."""
        outputs = self._executable.run(arrays, entry=program.entry).values()
        return [a[_box(of, starts, stops)] for a, of in zip(outputs, self._axes.outputs, strict=True)]

    def _drawn(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Random inputs, with masks that leave everything."""
        drawn = golden.draw_inputs(program, seed)
        return drawn | {name: np.ones_like(drawn[name]) for name in self._masks}

    def _filled(self, program: Program) -> dict[str, np.ndarray]:
        drawn = self._drawn(program, _SEED)
        return {tensor.name: np.full_like(drawn[tensor.name], layouts.filling(tensor)) for tensor in program.inputs}

    def _garbage(self, program: Program) -> Iterator[dict[str, np.ndarray]]:
        """Other inputs of usual size, and large ones, unless the program refuses them: floats may become indices."""
        yield self._drawn(program, _SEED + 1)
        drawn = self._drawn(program, _SEED + 2)
        large = {name: _scaled(array, _LARGE.get(array.dtype.itemsize, 1.0)) for name, array in drawn.items()}
        if not self._may_fail or self._takes(program, large):
            yield large

    def _takes(self, program: Program, arrays: Arrays) -> bool:
        try:
            self._run(program, arrays, {}, {})
        except InputError:
            return False
        return True


def _box(of: Axis, starts: Sizes, stops: Sizes) -> tuple[slice, ...]:
    """The elements from ``starts`` to ``stops`` along axes of named dimensions."""
    return tuple(slice(None) if name is None else slice(starts.get(name), stops.get(name)) for name in of)


def _scaled(array: np.ndarray, factor: float) -> np.ndarray:
    return array if array.dtype.kind in "biu" else (array * factor).astype(array.dtype)


def _opposite(array: np.ndarray) -> np.ndarray:
    """Numbers of the other sign, other bools, and the same integers."""
    if array.dtype.kind in "iu":
        return array
    return ~array if array.dtype.kind == "b" else -array


def _away_from_zero(array: np.ndarray, sign: int) -> np.ndarray:
    return array if array.dtype.kind in "biuc" else (sign * (abs(array) + 1)).astype(array.dtype)


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(numbers(array)).all())


def _same(program: Program, one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether two runs of a program agree, bit for bit unless the framework's own runs differ."""
    tolerance = program.golden.tolerance if program.golden else 0.0
    return all(
        a.tobytes() == b.tobytes() or (tolerance > 0 and difference(a, b).within(tolerance))
        for a, b in zip(one, other, strict=True)
    )
