"""A plan's refits replace weights and touch nothing else; each rule that one breaks is a sentence."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cpu_plans import floats, write_model
from onnx import helper
from programs import planned

import nimblec
import nimblert
from nimblert.check import verify
from nimblert.errors import PlanInvalidError
from nimblert.plan import Access, Launch, Memcpy, Memset, Plan, Pointer, Program, Region, Role, Tensor
from nimblert.plan.records import Limits

N = 32
NBYTES = 4 * N * N


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """X @ w @ v; with a second refit, which makes v of an input and reads nothing."""
    rng = np.random.default_rng(0)
    path = write_model(
        tmp_path_factory.mktemp("rules") / "model.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "v"], ["y"])],
        [floats("x", 4, N)],
        [floats("y", 4, N)],
        constants={name: rng.standard_normal((N, N)).astype(np.float32) for name in "wv"},
    )
    made = nimblec.compile(path, target="cpu", plan_cache=None)
    (given,) = made.refits
    w, v = sorted(given.inputs, key=lambda tensor: -ord(tensor.name[0]))
    return replace(made, refits=(replace(given, inputs=(w,)), making(v)))


def making(weight: Tensor) -> Program:
    """Return a refit that copies its input to where a weight lies."""
    start = Pointer(region=Region.INPUT, index=0, offset=0)
    copy = Memcpy(stream=0, op=0, dst=weight.pointer, src=start, nbytes=NBYTES)
    inputs = (replace(weight, pointer=start),)
    return planned(copy, name="second", inputs=inputs, input_nbytes=(NBYTES,), arena_nbytes=0, role=Role.REFIT)


def test_a_sound_plan_has_no_problems_and_is_refitted(plan: Plan) -> None:
    assert not list(verify.problems(plan))
    with nimblert.load(plan) as model:
        model.refit({"v": np.zeros((N, N), np.float32)})
        assert not model(np.ones((4, N), np.float32)).any()


def first(plan: Plan, **fields: object) -> Plan:
    return replace(plan, refits=(replace(plan.refits[0], **fields), plan.refits[1]))


def second(plan: Plan, **fields: object) -> Plan:
    return replace(plan, refits=(plan.refits[0], replace(plan.refits[1], **fields)))


def w_input(plan: Plan, **fields: object) -> Plan:
    return first(plan, inputs=(replace(plan.refits[0].inputs[0], **fields),))


def v_copy(plan: Plan, **fields: object) -> Plan:
    (command,) = plan.refits[1].commands
    return second(plan, commands=(replace(command, **fields),))


def weights_at(offset: int) -> Pointer:
    return Pointer(region=Region.WEIGHTS, index=0, offset=offset)


def offset_of(plan: Plan, refit: int) -> int:
    """Return where w lies (0), or v (1)."""
    if refit:
        (command,) = plan.refits[1].commands
        assert isinstance(command, Memcpy)
        return command.dst.offset
    return plan.refits[0].inputs[0].pointer.offset


CASES: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: first(p, role=Role.ENTRY), r"refits\[0\].role: ENTRY, expected REFIT"),
    (lambda p: first(p, inputs=()), r"refits\[0\].inputs: none"),
    (lambda p: second(p, output_nbytes=(4,)), r"refits\[1\].outputs: 0, expected none"),
    (lambda p: second(p, stream_count=2), r"refits\[1\].stream_count: 2, expected one stream"),
    (lambda p: first(p, profile=(("batch", 1),)), r"refits\[0\].profile: a refit has no profile, golden record"),
    (lambda p: first(p, golden=p.programs[0].golden), r"refits\[0\].profile: a refit has no profile, golden record"),
    (lambda p: first(p, schedule=p.programs[0].schedule), r"refits\[0\].profile: a refit has no profile, golden"),
    (lambda p: first(p, event_count=1), r"refits\[0\].stream_count: 1, expected one stream and no events"),
    (lambda p: w_input(p, strides=(1,)), r"refits\[0\].inputs\[0\].strides: 1, expected one for each of 2 dimensions"),
    (lambda p: w_input(p, name="v"), r"refits\[1\].inputs\[0\].name: 'v' is an input of refits\[0\] too"),
    (lambda p: w_input(p, strides=(N + 1, 1)), r"refits\[0\].inputs\[0\].*strides: \(33, 1\), expected"),
    (lambda p: w_input(p, pointer=weights_at(4)), r"refits\[0\].inputs\[0\].pointer: no weight of this dtype and size"),
    (lambda p: w_input(p, dtype="int32"), r"refits\[0\].inputs\[0\].pointer: no weight of this dtype and size"),
    (lambda p: w_input(p, dtype="?"), r"refits\[0\].inputs\[0\].dtype: '\?' is not one"),
    (
        lambda p: w_input(p, pointer=Pointer(region=Region.ARENA, index=0, offset=0)),
        r"refits\[0\].inputs\[0\].pointer: byte 0 of ARENA, expected a weight or an INPUT",
    ),
    (
        lambda p: w_input(p, pointer=weights_at(offset_of(p, 1))),
        r"refits\[1\].commands\[0\].writes: weights\[\d\] is given to refits\[0\], and not made",
    ),
    (
        lambda p: replace(p, refits=(p.refits[0], p.refits[1], replace(p.refits[1], name="third"))),
        r"refits\[2\].commands\[0\].writes: weights\[\d\] is made by refits\[1\] too",
    ),
    (
        lambda p: v_copy(p, nbytes=NBYTES - 4),
        rf"refits\[1\].commands\[0\].writes: {NBYTES - 4} bytes at \d+ of WEIGHTS are no whole weight",
    ),
    (lambda p: v_copy(p, nbytes=NBYTES + 4), r"refits\[1\].commands\[0\].*lie outside INPUT"),
    (
        lambda p: v_copy(p, dst=Pointer(region=Region.STATE, index=0, offset=0)),
        r"refits\[1\].commands\[0\].writes: is in STATE, expected WEIGHTS or ARENA",
    ),
    (
        lambda p: v_copy(p, src=weights_at(offset_of(p, 0))),
        r"refits\[1\].commands\[0\].reads: weights\[\d\] is given to refits\[0\]",
    ),
    (
        lambda p: second(
            p, commands=(*p.refits[1].commands, replace(p.refits[1].commands[0], src=weights_at(offset_of(p, 1))))
        ),
        r"refits\[1\].commands\[1\].reads: weights\[\d\] is made by refits\[1\], and no refit depends on another",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), CASES)
def test_each_rule_has_its_sentence(plan: Plan, change: Callable[[Plan], Plan], sentence: str) -> None:
    with pytest.raises(PlanInvalidError, match=sentence):
        nimblert.load(change(plan))


def test_a_run_still_writes_no_weights(plan: Plan) -> None:
    (program,) = plan.programs
    filled = Memset(stream=0, op=0, dst=weights_at(0), value=0, element_nbytes=1, count=NBYTES)
    hostile = replace(plan, programs=(replace(program, commands=(*program.commands, filled)),))
    with pytest.raises(PlanInvalidError, match="dst: is in WEIGHTS, which no run changes"):
        nimblert.load(hostile)
    with pytest.raises(PlanInvalidError, match=r"programs\[0\].role: REFIT, expected ENTRY"):
        nimblert.load(replace(hostile, programs=(replace(hostile.programs[0], role=Role.REFIT),)))


def test_a_launch_of_a_run_writes_no_weights(plan: Plan) -> None:
    (program,) = plan.programs
    launch = next(command for command in program.commands if isinstance(command, Launch))
    (access,) = launch.writes
    start = weights_at(offset_of(plan, 0))
    relocations = tuple(replace(r, pointer=start) if r.pointer == access.pointer else r for r in launch.relocations)
    changed = replace(launch, relocations=relocations, writes=(Access(pointer=start, nbytes=access.nbytes),))
    hostile = replace(plan, programs=(replace(program, commands=(changed, *program.commands[1:])),))
    with pytest.raises(PlanInvalidError, match="an output in WEIGHTS, which a run does not change"):
        nimblert.load(hostile)


def test_refits_obey_the_limits(plan: Plan) -> None:
    with pytest.raises(PlanInvalidError, match=r"refits: 2, the limit is 1: raise it \(nimblert.Limits\)"):
        nimblert.load(plan, limits=Limits(refits=1))
    with pytest.raises(PlanInvalidError, match=r"refits\[1\].memory: \d+ bytes, the limit is"):
        nimblert.load(plan, limits=Limits(memory_nbytes=NBYTES - 1))
