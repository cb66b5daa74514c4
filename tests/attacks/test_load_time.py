"""Plans whose checks or sessions would take minutes are loaded, or refused, in time that grows with their size."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hostile_plans import node_plan, placed, with_program
from onnx import helper

import nimblert
from fuzz import wrapped
from nimblert.check import verify
from nimblert.errors import PlanInvalidError
from nimblert.plan import Memset, Plan, Pointer, Region
from nimblert.plan.records import DEFAULT_LIMITS, Limits

node = helper.make_node


def split_and_joined(count: int) -> Plan:
    """Return the plan of two launches: one splits its input into so many values, which the other concatenates."""
    names = [f"v{i}" for i in range(count)]
    x, numbers = np.zeros(count, np.float32), [np.zeros(1, np.float32)] * count
    apart = [("float32", (1,))] * count
    split = node_plan(x, call=node("Split", ["x"], names, axis=0, num_outputs=count), outputs=apart, kind="input")
    whole = [("float32", (count,))]
    joined = node_plan(*numbers, call=node("Concat", names, ["y"], axis=0), outputs=whole, kind="input")
    values = [Pointer(region=Region.ARENA, offset=4 * i) for i in range(count)]
    first = placed(split, [Pointer(region=Region.WEIGHTS), *values])
    last = placed(joined, [*values, Pointer(region=Region.OUTPUT)])
    return replace(
        with_program(joined, commands=(first, replace(last, kernel=1)), arena_nbytes=4 * count),
        modules=(*split.modules, *joined.modules),
        kernels=(split.kernels[0], replace(joined.kernels[0], module=1)),
        weights=split.weights,
        weights_nbytes=split.weights_nbytes,
    )


def test_load_takes_many_values_of_a_launch_in_time() -> None:
    """In time that grows with their number: squared, these take half a minute."""
    plan = split_and_joined(6000)
    begin = time.process_time()
    with nimblert.load(plan, threads=1) as model:
        assert time.process_time() - begin < 12
        assert not model.run({})["y"].any()


def test_verify_takes_many_parameters_in_time() -> None:
    """Its outputs are compared with its operands although Add has one output: squared, these take half a minute."""
    names = [f"y{i}" for i in range(20_000)]
    call = node("Add", ["x", "x"], names)
    plan = node_plan(np.ones(1, np.float32), call=call, outputs=[("float32", (1,))] * len(names), kind="input")
    begin = time.process_time()
    problems = list(verify.problems(plan))
    assert time.process_time() - begin < 8
    assert f"kernels[0].Add: {len(names)} outputs, expected 1 to 1" in problems


def with_pauses(count: int) -> Plan:
    """Return a plan of so many launches with a fill between each two, so that no session runs two of them."""
    plan = node_plan(np.ones(4, np.float32), call=node("Neg", ["x"], ["y"]), outputs=[("float32", (4,))], kind="input")
    fill = Memset(stream=0, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=1, count=1)
    return with_program(plan, commands=(*plan.programs[0].commands, fill) * count, arena_nbytes=1)


def test_load_refuses_more_sessions_than_the_limit() -> None:
    nimblert.load(with_pauses(3), limits=Limits(sessions=3)).close()
    with pytest.raises(PlanInvalidError, match=r"^program 'main': needs more sessions than the limit, 3: raise it"):
        nimblert.load(with_pauses(4), limits=Limits(sessions=3))


def test_load_refuses_very_many_sessions_in_time() -> None:
    """As many as there may be kernels would take two minutes and 8 GB."""
    plan = with_pauses(4 * DEFAULT_LIMITS.sessions)
    begin = time.process_time()
    with pytest.raises(PlanInvalidError, match=f"more sessions than the limit, {DEFAULT_LIMITS.sessions}"):
        nimblert.load(plan)
    assert time.process_time() - begin < 8


@pytest.mark.slow
def test_load_takes_as_many_sessions_as_the_limit_in_time() -> None:
    """Each over a weight of its own: equal sessions are shared."""
    count = DEFAULT_LIMITS.sessions
    arrays = dict.fromkeys("xw", np.ones(4, np.float32))
    call = node("Add", ["x", "w"], ["y"], domain="", overload="")
    outputs = [wrapped.output(0, "y", "float32", (4,))]
    plan = wrapped.plan_of(call, 18, arrays, {"x": "input", "w": "external"}, outputs)
    x, w = plan.weights
    many = [replace(w, name=f"w{i}", offset=256 * (i + 1)) for i in range(count)]
    fill = Memset(stream=0, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=1, count=1)
    x_at, y_at = Pointer(region=Region.WEIGHTS), Pointer(region=Region.OUTPUT)
    launches = [placed(plan, [x_at, Pointer(region=Region.WEIGHTS, offset=weight.offset), y_at]) for weight in many]
    commands = tuple(command for launch in launches for command in (launch, fill))
    plan = replace(
        with_program(plan, commands=commands, arena_nbytes=1), weights=(x, *many), weights_nbytes=256 * (count + 1)
    )
    begin = time.process_time()
    with nimblert.load(plan, threads=1) as model:
        assert model.run({})["y"].tolist() == [2] * 4
    assert time.process_time() - begin < 30
