"""Comparisons of plans with their golden records."""

import nimblert
from nimblert import golden
from nimblert.executable import Executable
from nimblert.golden import Verdict
from nimblert.plan import Plan


def verdicts(plan: Plan) -> set[Verdict]:
    """Return the verdicts of the golden record on a plan's outputs in poisoned memory."""
    return _verdicts(plan, nimblert.load(plan, poison=True))


def unchecked_verdicts(plan: Plan) -> set[Verdict]:
    """Return the same for a plan that `load` refuses because its commands race."""
    return _verdicts(plan, Executable(plan, poison=True))


def _verdicts(plan: Plan, loaded: Executable) -> set[Verdict]:
    program = plan.programs[0]
    assert program.golden is not None
    inputs = golden.draw_inputs(program, program.golden.seed)
    with loaded:
        outputs = tuple(loaded.run(inputs).values())
    return {c.verdict for c in golden.check(program.golden, outputs)}
