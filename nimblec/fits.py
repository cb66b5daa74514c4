"""Find out by runs which calls of other sizes the programs of a plan serve.

A dimension may be padded where nothing that stands beyond a call's own elements changes a bit of its
outputs, whatever it is, and where programs of different sizes agree on the elements that they share. It
may be split where that holds for what stands before them, too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from nimblec.difference import difference, numbers
from nimblec.errors import CompileError
from nimblert import golden, padding
from nimblert.executable import Executable
from nimblert.plan import Fit, Plan, Program, Target
from nimblert.sizes import Axes, writes_state

_SEED = 0
_TOLERANCE = {Target.CPU: 1e-4, Target.CUDA: 1e-2}
"""Of an output's largest magnitude: programs of different sizes may add up in another order, and round to TF32."""

_LARGE = {2: 10.0, 4: 1e3, 8: 1e3}
"""A factor for what stands beyond, by bytes of a number: no sum over it may go unnoticed, none may overflow."""

Arrays: TypeAlias = Mapping[str, np.ndarray]
Sizes: TypeAlias = Mapping[str, int]
Axis: TypeAlias = Sequence[str | None]


def find_fits(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the fits of its programs, and what the user should know of them."""
    found: dict[str, tuple[Fit, ...]] = {}
    notes: list[str] = []
    with Executable(plan) as executable:
        for programs in _sized(plan):
            trial = _Trial(executable, programs, _TOLERANCE[plan.target])
            fits = {program.name: trial.fits(program) for program in programs}
            found |= fits
            notes += _notes(programs, fits)
    proved = tuple(replace(p, fits=found.get(p.name, ())) for p in plan.programs)
    return replace(plan, programs=proved), tuple(notes)


def mark_masks(plan: Plan, masks: Collection[str]) -> Plan:
    """The plan with the inputs called ``masks`` marked as such.

    Raises CompileError for a name that is no input with a dimension of several sizes.
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
            raise CompileError(f"--pad-mask {mask}: has no dimension of several sizes")
    marked = (
        replace(program, inputs=tuple(replace(t, mask=t.name in masks) for t in program.inputs))
        for program in plan.programs
    )
    return replace(plan, programs=tuple(marked))


def differences(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each dimension of a program whose fit runs on this machine contradict."""
    with Executable(plan) as executable:
        for programs in _sized(plan):
            trial = _Trial(executable, programs, _TOLERANCE[plan.target])
            for program in programs:
                for (name, _), claimed, found in zip(program.profile, program.fits, trial.fits(program), strict=False):
                    if claimed > found:
                        yield f"program {program.name!r}: {name} is {claimed.name}, and runs show {found.name}"


def _sized(plan: Plan) -> Iterator[tuple[Program, ...]]:
    """The programs of each entry for several sizes."""
    return (programs for programs in plan.entries.values() if programs[0].profile)


def _notes(programs: Sequence[Program], fits: Mapping[str, tuple[Fit, ...]]) -> Iterator[str]:
    for position, (name, _) in enumerate(programs[0].profile):
        least = min(fits[program.name][position] for program in programs)
        yield f"{name}: {_MEANING[least]}"


_MEANING = {
    Fit.EXACT: "calls of other sizes than the plan's are refused, since what else is there changes the results",
    Fit.PADDED: "calls of sizes between are padded",
    Fit.SPLIT: "calls of sizes between are padded, larger ones split",
}


class _Trial:
    """Runs of the programs of one entry."""

    def __init__(self, executable: Executable, programs: Sequence[Program], tolerance: float) -> None:
        self._executable = executable
        self._programs = programs
        self._axes = Axes(programs)
        self._masks = {tensor.name for tensor in programs[0].inputs if tensor.mask}
        self._tolerance = tolerance

    def fits(self, program: Program) -> tuple[Fit, ...]:
        """Which calls a program serves, by the dimensions of its profile."""
        sizes = dict(program.profile)
        if writes_state(program):
            return (Fit.EXACT,) * len(sizes)
        found = {name: self._fit(program, name) for name in sizes}
        padded: dict[str, int] = {}
        for name, fit in found.items():
            if fit is not Fit.EXACT:
                together = {**padded, name: max(sizes[name] - 1, 1)}
                if padded and not self._is_alone(program, together):
                    found[name] = Fit.EXACT
                else:
                    padded = together
        return tuple(found.values())

    def _fit(self, program: Program, name: str) -> Fit:
        """Which calls a program serves that have another size of one dimension."""
        size, others = dict(program.profile)[name], self._neighbours(program, name)
        is_given = all(name in of for of in self._axes.outputs)
        if not size or not others or name in self._axes.bound or not (is_given or self._is_masked(name)):
            return Fit.EXACT
        below = max((dict(p.profile)[name] for p in others), key=lambda n: (n < size, n))
        used = {below + 1, size - 1} if below < size else {1, size - 1}
        if not all(self._is_alone(program, {name: n}) for n in used - {0, size}):
            return Fit.EXACT
        if not all(self._agree(program, other, name, at_end=False) for other in others):
            return Fit.EXACT
        splits = is_given and self._is_alone_at_end(program, name)
        return Fit.SPLIT if splits and all(self._agree(program, o, name, at_end=True) for o in others) else Fit.PADDED

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

    def _is_alone(self, program: Program, stops: Sizes) -> bool:
        """Whether what stands beyond ``stops`` leaves the outputs before as they are, bit for bit."""
        base, filled = self._drawn(program, _SEED), self._filled(program)
        masks = {name: filled[name] for name in self._masks}
        rests = (filled, *({**rest, **masks} for rest in self._garbage(program)))
        results = [self._run(program, self._merged(program, base, rest, {}, stops), {}, stops) for rest in rests]
        return all(map(_is_finite, results[0])) and all(_same(program, results[0], other) for other in results[1:])

    def _is_alone_at_end(self, program: Program, name: str) -> bool:
        """Whether what stands before the last element leaves its outputs as they are, bit for bit."""
        starts = {name: dict(program.profile)[name] - 1}
        base = self._drawn(program, _SEED)
        rests = (base, *self._garbage(program))
        results = [self._run(program, self._merged(program, base, rest, starts, {}), starts, {}) for rest in rests]
        return all(_same(program, results[0], other) for other in results[1:])

    def _agree(self, one: Program, other: Program, name: str, *, at_end: bool) -> bool:
        """Whether two programs agree on the elements that both have: the first ones of the larger, or the last."""
        small, large = sorted((one, other), key=lambda p: dict(p.profile)[name])
        count, total = dict(small.profile)[name], dict(large.profile)[name]
        starts = {name: total - count if at_end else 0}
        stops = {name: starts[name] + count}
        base = self._drawn(large, _SEED)
        whole = base if at_end else self._merged(large, base, self._filled(large), starts, stops)
        part = {
            tensor.name: base[tensor.name][_box(of, starts, stops)]
            for tensor, of in zip(large.inputs, self._axes.inputs, strict=True)
        }
        expected, found = self._run(small, part, {}, {}), self._run(large, whole, starts, stops)
        return all(map(_is_finite, expected)) and all(
            difference(e, f).within(self._tolerance) for e, f in zip(expected, found, strict=True)
        )

    def _merged(self, program: Program, base: Arrays, rest: Arrays, starts: Sizes, stops: Sizes) -> Arrays:
        """The ``rest`` with a box of the ``base`` in it."""
        merged = {name: array.copy() for name, array in rest.items()}
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
        return {tensor.name: np.full_like(drawn[tensor.name], padding.filling(tensor)) for tensor in program.inputs}

    def _garbage(self, program: Program) -> Iterator[dict[str, np.ndarray]]:
        """Other inputs of usual size, and large ones."""
        yield self._drawn(program, _SEED + 1)
        yield {name: _enlarged(array) for name, array in self._drawn(program, _SEED + 2).items()}


def _box(of: Axis, starts: Sizes, stops: Sizes) -> tuple[slice, ...]:
    """Along axes of named dimensions, the elements from where they start to where they stop."""
    return tuple(slice(None) if name is None else slice(starts.get(name), stops.get(name)) for name in of)


def _enlarged(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "biu":
        return array
    return (array * _LARGE.get(array.dtype.itemsize, 1.0)).astype(array.dtype)


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(numbers(array)).all())


def _same(program: Program, one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether two runs of a program agree, bit for bit unless the framework's own runs differ."""
    tolerance = program.golden.tolerance if program.golden else 0.0
    return all(
        a.tobytes() == b.tobytes() or (tolerance > 0 and difference(a, b).within(tolerance))
        for a, b in zip(one, other, strict=True)
    )
