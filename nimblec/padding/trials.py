"""Runs of programs that show whether padding or splitting changes results."""

from collections.abc import Callable, Sequence

import numpy as np

from nimblec.base.difference import difference, numbers
from nimblec.padding.draws import Arrays, Draws, Sizes, box_of
from nimblert.check import program_rules
from nimblert.errors import InputError
from nimblert.executable import Executable
from nimblert.plan import Fit, Program, Target
from nimblert.plan.dimensions import Axes

_TOLERANCE = {Target.CPU: 1e-4, Target.CUDA: 1e-2}
"""Of an output's largest magnitude: programs of different sizes may add up in another order, and round to TF32."""


class Trial:
    """Runs of the programs of one entry."""

    def __init__(self, executable: Executable, programs: Sequence[Program]) -> None:
        self._executable = executable
        self._programs = programs
        self._axes = Axes(programs)
        self._draws = {program.name: Draws(program, self._axes) for program in programs}
        self._target = executable.plan.target
        self._compared: dict[tuple[str, str, str, int | None], bool] = {}

    def is_exact(self, program: Program) -> bool:
        """Return whether a run writes the state, into which padding must not get, or crops outputs itself."""
        return bool(program_rules.why_exact(self._executable.plan.state, program))

    def fit(self, program: Program, name: str, most: Fit) -> Fit:
        """Return which calls with another size of one dimension a program serves, and no more than ``most``."""
        size, others = dict(program.profile)[name], self._neighbours(program, name)
        if not (size and others) or name in self._axes.bound or most is Fit.EXACT:
            return Fit.EXACT
        below = max((n for p in others if (n := dict(p.profile)[name]) < size), default=0)
        fewest = min(below + 1, size - 1)
        if fewest and not self.is_alone(program, stops={name: fewest}):
            return Fit.EXACT
        if not all(self._agree(program, other, name, 0) for other in others):
            return Fit.EXACT
        if most is Fit.PADDED or not self.is_alone(program, starts={name: size - 1}):
            return Fit.PADDED
        agree = all(self._agree(program, other, name, start) for other in others for start in (1, None))
        return Fit.SPLIT if agree else Fit.PADDED

    def is_alone(self, program: Program, *, starts: Sizes | None = None, stops: Sizes | None = None) -> bool:
        """Return whether elements before ``starts`` and beyond ``stops`` leave the others unchanged, bit for bit."""
        begins, ends = starts or {}, stops or {}
        for given in self._draws[program.name].surrounded(begins, ends, self._takes(program)):
            first, *others = (self._run(program, arrays, begins, ends) for arrays in given)
            if not all(map(_is_finite, first)) or not all(_same(program, first, other) for other in others):
                return False
        return True

    def _neighbours(self, program: Program, name: str) -> list[Program]:
        """Return the programs of the next size below and above in one dimension, of the same sizes in all others."""
        profile = dict(program.profile)
        row = [p for p in self._programs if {**dict(p.profile), name: 0} == {**profile, name: 0}]
        row.sort(key=lambda p: dict(p.profile)[name])
        at = row.index(program)
        return [other for other in row[max(at - 1, 0) : at + 2] if other is not program]

    def _agree(self, one: Program, other: Program, name: str, start: int | None) -> bool:
        """Return whether the smaller program agrees with elements of the larger, from ``start`` or the last ones."""
        small, large = sorted((one, other), key=lambda p: dict(p.profile)[name])
        # Each pair is asked for twice, by both of its programs.
        pair = small.name, large.name, name, start
        if pair not in self._compared:
            self._compared[pair] = self._agrees_with(small, large, name, start)
        return self._compared[pair]

    def _agrees_with(self, small: Program, large: Program, name: str, start: int | None) -> bool:
        count, total = dict(small.profile)[name], dict(large.profile)[name]
        starts = {name: total - count if start is None else start}
        stops = {name: starts[name] + count}
        draws = self._draws[large.name]
        for drawn in draws.bases():
            base = draws.fitting(drawn, {name: count})
            whole = base if start != 0 else draws.merged(base, draws.filled, starts, stops)
            expected = self._run(small, draws.part(base, starts, stops), {}, {})
            found = self._run(large, whole, starts, stops)
            if not all(map(_is_finite, expected)):
                return False
            tolerance = _TOLERANCE[self._target]
            if not all(difference(e, f).within(tolerance) for e, f in zip(expected, found, strict=True)):
                return False
        return True

    def _run(self, program: Program, arrays: Arrays, starts: Sizes, stops: Sizes) -> list[np.ndarray]:
        """Return a box of each output."""
        outputs = self._executable.run(arrays, entry=program.entry).values()
        return [a[box_of(of, starts, stops)] for a, of in zip(outputs, self._axes.outputs, strict=True)]

    def _takes(self, program: Program) -> Callable[[Arrays], bool]:
        """Tell whether a program takes some inputs, as floats may become indices.

        On a GPU, reading past a table ends the process, and tables are not read.
        """

        def takes(arrays: Arrays) -> bool:
            if self._target is not Target.CPU:
                return True
            try:
                self._run(program, arrays, {}, {})
            except InputError:
                return False
            return True

        return takes


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(numbers(array)).all())


def _same(program: Program, one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether two runs of a program agree, bit for bit unless the framework's own runs differ."""
    tolerance = program.golden.tolerance if program.golden else 0.0
    return all(
        a.tobytes() == b.tobytes() or (tolerance > 0 and difference(a, b).within(tolerance))
        for a, b in zip(one, other, strict=True)
    )
