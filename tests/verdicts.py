"""How a plan compares with its golden record."""

import nimblert
from nimblert import golden
from nimblert.golden import Verdict
from nimblert.plan import Plan


def verdicts(plan: Plan) -> set[Verdict]:
    """How a plan's outputs in poisoned memory compare with its golden record."""
    (program,) = plan.programs
    assert program.golden is not None
    inputs = golden.draw_inputs(program, program.golden.seed)
    with nimblert.load(plan, poison=True) as executable:
        outputs = tuple(executable.run(inputs).values())
    return {c.verdict for c in golden.check(program.golden, outputs)}
