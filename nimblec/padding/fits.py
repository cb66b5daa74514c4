"""Determine which calls of other sizes the programs of a plan can serve.

A dimension may be padded if the elements beyond a call's own, whatever they hold, change no bit of its outputs, and if
programs of different sizes agree on the elements that they share. It may be split if that also holds for the elements
before a call's own, and if it is one axis of each output. Both must hold for every program of an entry. The graph
proves it, but for sizes that it hides in constants; runs of the programs confirm it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from nimblec.base.errors import CompileError
from nimblec.padding.trials import Trial
from nimblec.padding.values import Proof
from nimblert.check.program_rules import why_exact
from nimblert.executable import Executable
from nimblert.plan import Fit, Plan, Program
from nimblert.plan.dimensions import Axes

Proofs: TypeAlias = Mapping[str, Mapping[str, Proof]]
"""By program and dimension."""


def find_fits(plan: Plan, proofs: Proofs) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the fits of its programs, and notes about them for the user."""
    found: dict[str, tuple[Fit, ...]] = {}
    notes: list[str] = []
    with Executable(plan) as executable:
        for programs in _sized(plan):
            each = [proofs[program.name] for program in programs]
            names = [name for name, _ in programs[0].profile]
            proved = {name: min((of[name] for of in each), key=lambda proof: proof.fit) for name in names}
            fits = _common_fits(Trial(executable, programs), programs, {n: proof.fit for n, proof in proved.items()})
            found |= {program.name: tuple(fits[name] for name, _ in program.profile) for program in programs}
            notes += (f"{name}: {_note(plan, programs, name, fit, proved[name])}" for name, fit in fits.items())
    fitted = tuple(replace(p, fits=found.get(p.name, ())) for p in plan.programs)
    return replace(plan, programs=fitted), tuple(notes)


def mark_masks(plan: Plan, masks: Collection[str]) -> Plan:
    """Return the plan with the inputs called ``masks`` marked as such.

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
    """Yield a sentence for each fit that runs on this machine contradict."""
    with Executable(plan) as executable:
        for programs in _sized(plan):
            claims = [dict(zip(dict(p.profile), p.fits, strict=False)) for p in programs]
            claimed = {name: max(of.get(name, Fit.EXACT) for of in claims) for name, _ in programs[0].profile}
            common = _common_fits(Trial(executable, programs), programs, claimed)
            for program, of in zip(programs, claims, strict=True):
                for name, fit in of.items():
                    if fit > common[name]:
                        yield f"program {program.name!r}: {name} is {fit.name}, and runs show {common[name].name}"


def _common_fits(trial: Trial, programs: Sequence[Program], most: Mapping[str, Fit]) -> dict[str, Fit]:
    """Return the calls that all programs serve, by dimension, and no more than ``most``."""
    each = [_fits(trial, program, most) for program in programs]
    return {name: min(fits[name] for fits in each) for name in most}


def _fits(trial: Trial, program: Program, most: Mapping[str, Fit]) -> dict[str, Fit]:
    """Return the calls that one program can serve, by dimension, and no more than ``most``."""
    sizes = dict(program.profile)
    if trial.is_exact(program):
        return dict.fromkeys(sizes, Fit.EXACT)
    found = {name: trial.fit(program, name, most[name]) for name in sizes}
    padded: dict[str, int] = {}
    for name, fit in found.items():
        if fit is not Fit.EXACT:
            together = {**padded, name: max(sizes[name] - 1, 1)}
            if padded and not trial.is_alone(program, stops=together):
                found[name] = Fit.EXACT
            else:
                padded = together
    return found


def _note(plan: Plan, programs: Sequence[Program], name: str, fit: Fit, proof: Proof) -> str:
    """Explain what calls of other sizes get, and where they get nothing, why and what may help."""
    refused = "calls of other sizes than the plan's are refused, since"
    if why := next(filter(None, (why_exact(plan.state, program) for program in programs)), None):
        return f"{refused} a run {why}"
    if fit is Fit.SPLIT:
        return "calls of sizes between are padded, larger ones split"
    if fit is Fit.PADDED:
        why = f"; larger ones are refused, since {proof.fault}" if proof.fault else ""
        return f"calls of sizes between are padded{why}"
    lacks_mask = not any(tensor.mask for tensor in programs[0].inputs) and any(
        name not in of for of in Axes(programs).outputs
    )
    advice = "; if an input is a mask, --pad-mask names it" if lacks_mask else ""
    return f"{refused} {proof.fault if proof.fit is Fit.EXACT else 'padding changes the results'}{advice}"


def _sized(plan: Plan) -> Iterator[tuple[Program, ...]]:
    """Return the programs of each entry for several sizes."""
    return (programs for programs in plan.entries.values() if programs[0].profile)
