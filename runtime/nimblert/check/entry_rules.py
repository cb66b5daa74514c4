"""The rules of entries: their programs differ in sizes alone, and can serve the sizes that their fits declare."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from nimblert.check.extents import MAX_RANK
from nimblert.check.state_rules import writes_state
from nimblert.plan import Fit, Plan, Profile, Program, Role
from nimblert.plan.dimensions import Axes, Shapes, profile_text, shapes_of

_Signature: TypeAlias = tuple[object, ...]
"""The properties that all programs of an entry share."""


def problems(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each program that is not distinct within its entry, or whose fits are wrong."""
    first: dict[str, tuple[int, _Signature]] = {}
    taken: dict[tuple[str, Shapes], int] = {}
    profiles: dict[tuple[str, frozenset[tuple[str, int]]], int] = {}
    of_entries: defaultdict[str, dict[int, Program]] = defaultdict(dict)
    for i, program in enumerate(plan.programs):
        path = f"programs[{i}]"
        broken = tuple(_profile_problems(f"{path}.profile", program.profile))
        yield from broken
        yield from (f"{path}.outputs[{j}].mask: only inputs are masks" for j, t in enumerate(program.outputs) if t.mask)
        if program.role is not Role.ENTRY:
            yield f"{path}.role: {program.role.name}, which no command runs"
            continue
        if not broken:
            of_entries[program.entry][i] = program
        signature = _signature(program)
        other, expected = first.setdefault(program.entry, (i, signature))
        if signature != expected:
            yield f"{path}: takes or gives other tensors than programs[{other}], which is of the same entry"
        same = profiles.setdefault((program.entry, frozenset(program.profile)), i)
        if same != i:
            yield f"{path}.profile: {profile_text(program.profile)}, as programs[{same}] of the same entry"
        same = taken.setdefault((program.entry, shapes_of(program.inputs)), i)
        if same != i:
            yield f"{path}.inputs: have the shapes of programs[{same}], which is of the same entry"
    for programs in of_entries.values():
        if len({_signature(program) for program in programs.values()}) == 1:
            yield from _fit_problems(plan, programs)


def _profile_problems(path: str, profile: Profile) -> Iterator[str]:
    names = [name for name, _ in profile]
    if len(names) > MAX_RANK:
        yield f"{path}: {len(names)} dimensions, expected at most {MAX_RANK}"
    elif len(set(names)) != len(names) or not all(name.isprintable() and name for name in names):
        yield f"{path}: {names}, expected a name for each dimension, no two the same"
    elif not all(0 <= size < 1 << 63 for _, size in profile):
        yield f"{path}: {profile_text(profile)}, expected sizes below {1 << 63}"


def _signature(program: Program) -> _Signature:
    sides = (tuple((t.name, t.dtype, len(t.shape)) for t in side) for side in (program.inputs, program.outputs))
    return (*sides, frozenset(name for name, _ in program.profile))


def _fit_problems(plan: Plan, programs: Mapping[int, Program]) -> Iterator[str]:
    """Yield a sentence for each fit that the shapes of an entry contradict; ``programs`` are by index in the plan.

    They must agree in their tensors and in the names of their profiles.
    """
    if not any(program.fits for program in programs.values()):
        return
    axes = Axes(list(programs.values()))
    taken = {name for of in axes.inputs for name in of}
    for i, program in programs.items():
        path = f"programs[{i}].fits"
        if len(program.fits) != len(program.profile):
            yield f"{path}: {len(program.fits)}, expected one for each of {len(program.profile)} dimensions"
            continue
        if all(fit is Fit.EXACT for fit in program.fits):
            continue
        stateful = writes_state(plan.state, program)
        for (name, size), fit in zip(program.profile, program.fits, strict=True):
            if fit is Fit.EXACT:
                continue
            if name not in taken or name in axes.bound or size < 1:
                yield f"{path}: {name}={size} is {fit.name}, and no axis of an input is {name!r} in all programs alike"
            elif fit is Fit.SPLIT and any(of.count(name) != 1 for of in axes.outputs):
                yield f"{path}: {name!r} is SPLIT, expected one axis of it in each output"
            elif stateful:
                yield f"{path}: {name!r} is {fit.name}, and the program writes the state"
