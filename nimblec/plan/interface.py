"""The interface of a plan: what callers depend on, whatever it runs on."""

from collections.abc import Mapping
from typing import TypeAlias

from nimblert.plan import Crop, Plan, Program

Facts: TypeAlias = Mapping[str, str]


def shape_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a tensor type for people to read: ``float32 1x3x224x224``, ``int64 scalar``."""
    return f"{dtype} {'x'.join(map(str, shape)) or 'scalar'}"


def of_program(program: Program | None) -> Facts:
    """Return what callers depend on: entry, sizes, and by position inputs and outputs."""
    if program is None:
        return {}
    bound = {work.output for _, work in program.work if isinstance(work, Crop)}
    fits = [fit.name.lower() for fit in program.fits] or ["exact"] * len(program.profile)
    sizes = [f"{name}={n} ({fit})" for (name, n), fit in zip(program.profile, fits, strict=True)]
    sides = program.inputs, program.outputs
    inputs, outputs = ([f"{t.name}: {shape_text(t.dtype, t.shape)}" for t in side] for side in sides)
    return {
        "entry": program.entry,
        "sizes": ", ".join(sizes) or "one",
        **{f"input {i}": text for i, text in enumerate(inputs)},
        **{f"output {i}": text + " at most" * (i in bound) for i, text in enumerate(outputs)},
    }


def of_plan(plan: Plan) -> Facts:
    """Return the interfaces of all programs, and the state that callers can name."""
    programs = {f"program {p.name!r}: {what}": fact for p in plan.programs for what, fact in of_program(p).items()}
    return programs | {f"state {t.name!r}": shape_text(t.dtype, t.shape) for t in plan.state if t.name}
