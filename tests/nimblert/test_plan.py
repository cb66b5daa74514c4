"""How records of a plan show themselves."""

from dataclasses import replace

import plans
import pytest

from nimblert.plan import Plan, Weight


@pytest.mark.parametrize("plan", [plans.cuda_plan(), plans.cpu_plan(), plans.large_plan(2000)])
def test_every_record_is_one_short_line(plan: Plan) -> None:
    program = plan.programs[0]
    many = replace(program, inputs=program.inputs * 500, outputs=program.outputs * 500)
    records = (plan, replace(plan, programs=plan.programs * 500), program, many, many.golden, many.schedule)
    for record in (*records, *plan.kernels, *plan.weights, *plan.state, *program.inputs, *program.commands):
        shown = repr(record)
        assert len(shown) <= 500
        assert "\n" not in shown


def test_what_is_shown() -> None:
    plan = plans.cpu_plan()
    weight, program = plan.weights[0], plan.programs[0]
    assert repr(weight) == (
        f"Weight({weight.name!r}: {weight.dtype} {weight.shape}, {weight.data.nbytes} bytes at {weight.offset})"
    )
    assert f"{len(plan.kernels)} kernels, {len(plan.weights)} weights" in repr(plan)
    assert repr(program).startswith(f"Program({program.name!r}: {program.inputs[0].name!r}: float32")


def test_names_do_not_reach_a_terminal_as_they_are() -> None:
    plan = plans.cpu_plan()
    hostile = "\x1b]0;evil\x07\n"
    program = replace(plan.programs[0], name=hostile)
    weight = Weight(name=hostile, dtype="float32", shape=(), offset=0, data=memoryview(bytes(4)))
    for record in (program, weight, replace(plan, producer=hostile, programs=(program,))):
        assert repr(record).isprintable()
