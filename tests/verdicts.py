"""How a plan compares with its golden record."""

from nimblert import executable, golden
from nimblert.golden import Verdict
from nimblert.plan import Plan


def verdicts(plan: Plan) -> set[Verdict]:
    """How a plan's outputs in poisoned memory compare with its golden record; one that races is run, too."""
    (program,) = plan.programs
    assert program.golden is not None
    inputs = golden.draw_inputs(program, program.golden.seed)
    backend = executable._backend(plan, program, poison=True)
    with executable.Executable(plan, program, backend) as unchecked:
        outputs = tuple(unchecked.run(inputs).values())
    return {c.verdict for c in golden.check(program.golden, outputs)}
