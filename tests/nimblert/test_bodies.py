"""Loops and branches of hostile plans are refused: what a body does is what the command that runs it declares."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from host_driver import HostDriver
from programs import bare, planned

from nimblec.plan import encoder
from nimblert import load
from nimblert.check import verify
from nimblert.check.hazards import hazards
from nimblert.cuda import driver
from nimblert.errors import InputError, PlanInvalidError
from nimblert.plan import (
    Access,
    Command,
    Memcpy,
    Memset,
    Op,
    Plan,
    Pointer,
    Program,
    Record,
    Region,
    Role,
    Switch,
    Target,
    Tensor,
    While,
)
from nimblert.plan.records import Limits


def at(offset: int, region: Region = Region.ARENA) -> Pointer:
    return Pointer(region=region, offset=offset)


def whole(offset: int, nbytes: int) -> Access:
    return Access(pointer=at(offset), nbytes=nbytes)


def fill(offset: int, nbytes: int, value: int = 0, region: Region = Region.ARENA) -> Memset:
    return Memset(stream=0, op=0, dst=at(offset, region), value=value, element_nbytes=1, count=nbytes)


def program(name: str, *commands: Command, role: Role = Role.BODY) -> Program:
    is_entry = role is Role.ENTRY
    output = Tensor(name="y", dtype="uint8", shape=(8,), strides=(1,), pointer=at(0, Region.OUTPUT))
    return planned(
        *commands,
        name=name,
        outputs=(output,) if is_entry else (),
        output_nbytes=(8,) if is_entry else (),
        arena_nbytes=64 if is_entry else 0,
        ops=(Op(name="op", source="model"),),
        role=role,
    )


LOOP = While(stream=0, op=0, condition=at(0), body=0, limit=9, reads=(whole(0, 1),), writes=(whole(0, 1), whole(8, 8)))
BRANCH = Switch(stream=0, op=0, index=at(8), bodies=(1, 2), reads=(whole(8, 1),), writes=(whole(16, 8),))
COPY = Memcpy(stream=0, op=0, dst=at(0, Region.OUTPUT), src=at(16), nbytes=8)
PLAN = bare(
    program("main", fill(0, 1, 1), fill(8, 8, 1), LOOP, BRANCH, COPY, role=Role.ENTRY),
    bodies=(
        program("loop", fill(8, 8, 0), fill(0, 1, 0)),
        program("else", fill(16, 8, 5)),
        program("then", fill(16, 8, 7)),
    ),
)


def changed(body: int, *commands: Command) -> Plan:
    bodies = list(PLAN.bodies)
    bodies[body] = replace(bodies[body], commands=commands)
    return replace(PLAN, bodies=tuple(bodies))


def with_main(*commands: Command) -> Plan:
    return replace(PLAN, programs=(replace(PLAN.programs[0], commands=commands),))


def test_a_sound_plan_runs_its_bodies() -> None:
    verify.check(PLAN)
    with load(encoder.encode_file(PLAN)) as executable:
        assert executable.run({})["y"].tolist() == [5] * 8
    without_loop = with_main(fill(0, 1, 0), fill(8, 8, 1), LOOP, BRANCH, COPY)
    with load(without_loop) as executable:
        assert executable.run({})["y"].tolist() == [7] * 8


def test_events_of_a_body_order_nothing(on_gpu: Callable[[Plan], Plan]) -> None:
    """The body has more events than the entry that runs it, and runs in issue order."""
    body = replace(program("loop", fill(8, 8, 0), fill(0, 1, 0), Record(stream=0, event=0)), event_count=1)
    plan = replace(PLAN, bodies=(body, *PLAN.bodies[1:]))
    for made in (plan, on_gpu(plan)):
        with load(made) as executable:
            assert executable.run({})["y"].tolist() == [5] * 8


def test_a_byte_beyond_the_bodies_chooses_the_last() -> None:
    with load(with_main(fill(0, 1, 0), fill(8, 8, 200), LOOP, BRANCH, COPY)) as executable:
        assert executable.run({})["y"].tolist() == [7] * 8


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], Plan]:
    """Turn a plan into one for the GPU of a fake driver."""
    host = HostDriver()
    monkeypatch.setattr(driver, "bindings", lambda: host)
    return lambda plan: replace(plan, target=Target.CUDA, device=driver.describe())


def test_conditional_nodes_run_bodies(on_gpu: Callable[[Plan], Plan]) -> None:
    with load(on_gpu(PLAN)) as executable:
        assert executable.run({})["y"].tolist() == [5] * 8
        assert executable.run({})["y"].tolist() == [5] * 8
    plan = on_gpu(with_main(fill(0, 1, 0), fill(8, 8, 200), LOOP, BRANCH, COPY))
    with load(plan) as executable:
        assert executable.run({})["y"].tolist() == [7] * 8
        assert list(executable._backends["main"].steps()) == list(plan.programs[0].commands), "each can run alone"


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_loop_beyond_its_limit_fails_again_and_again(is_on_gpu: bool, on_gpu: Callable[[Plan], Plan]) -> None:
    endless = changed(0, fill(8, 8, 0), fill(0, 1, 1))
    with load(on_gpu(endless) if is_on_gpu else endless) as executable:
        for _ in range(3):
            with pytest.raises(InputError, match=r"op op \(model\): has not ended after 9 trips"):
                executable.run({})


HOSTILE: dict[str, tuple[Callable[[], Plan], str]] = {
    "writes undeclared memory": (
        lambda: changed(0, fill(8, 8), fill(0, 1), fill(32, 4)),
        r"commands\[2\]\.body: commands\[2\] writes what the command that runs the body does not declare",
    ),
    "reads undeclared memory": (
        lambda: changed(1, replace(COPY, dst=at(16), src=at(40))),
        r"commands\[3\]\.body: commands\[0\] reads what",
    ),
    "writes outside of the arena": (
        lambda: changed(0, fill(0, 1), fill(60, 8)),
        r"bodies\[0\]\.commands\[1\]\.dst: 8 bytes at 60 lie outside ARENA\(0\) \(64 bytes\)",
    ),
    "writes weights": (
        lambda: changed(1, fill(16, 8), fill(0, 4, region=Region.WEIGHTS)),
        r"bodies\[1\]\.commands\[1\]\.dst: is in WEIGHTS, which no run changes",
    ),
    "never ends": (lambda: changed(0, fill(8, 8)), "the body never writes it, so the loop would not end"),
    "runs itself": (lambda: changed(0, fill(0, 1), LOOP), r"runs bodies\[0\], expected one from 1 to 2"),
    "runs each other": (lambda: changed(2, fill(16, 8), replace(BRANCH, bodies=(1,))), "expected one from 3 to 2"),
    "is run twice": (
        lambda: with_main(*PLAN.programs[0].commands, replace(BRANCH, bodies=(1,))),
        r"runs bodies\[1\], which another command runs too",
    ),
    "is run by none": (
        lambda: with_main(fill(0, 1, 0), fill(8, 8, 1), LOOP, replace(BRANCH, bodies=(1,)), COPY),
        r"bodies\[2\]: no command runs it",
    ),
    "has no bodies": (
        lambda: with_main(fill(0, 1), fill(8, 8), LOOP, replace(BRANCH, bodies=()), COPY),
        "bodies: there are none",
    ),
    "is an entry": (
        lambda: replace(PLAN, bodies=(replace(PLAN.bodies[0], role=Role.ENTRY), *PLAN.bodies[1:])),
        r"bodies\[0\]\.role: ENTRY, expected BODY",
    ),
    "loops for ever": (
        lambda: with_main(fill(0, 1, 1), fill(8, 8, 1), replace(LOOP, limit=1 << 62), BRANCH, COPY),
        "limit: 4611686018427387904, the limit is 16777216: raise it",
    ),
    "has an unwritten condition": (
        lambda: with_main(fill(0, 1), fill(8, 8, 1), replace(LOOP, reads=()), BRANCH, COPY),
        "condition: expected a byte that is written before the loop and in its body",
    ),
}


@pytest.mark.parametrize(("make", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_is_refused(make: Callable[[], Plan], sentence: str) -> None:
    with pytest.raises(PlanInvalidError, match=sentence):
        verify.check(make())


def test_what_a_loop_writes_counts_as_written_only_if_it_was_before() -> None:
    plan = with_main(fill(0, 1), LOOP, BRANCH, COPY)
    verify.check(plan)
    (sentence,) = hazards(plan.programs[0], target=Target.CPU, bodies=plan.bodies)
    assert sentence.endswith("commands[2] (switch of op 'model'): reads arena bytes 8 to 9, which nobody wrote")


def test_what_one_branch_writes_does_not_count_as_written() -> None:
    plan = changed(2, fill(16, 4))
    verify.check(plan)
    (sentence,) = hazards(plan.programs[0], target=Target.CPU, bodies=plan.bodies)
    assert sentence.endswith("reads arena bytes 16 to 24, which nobody wrote")


def test_what_a_body_reads_is_written_before() -> None:
    reading = replace(COPY, dst=at(8), src=at(12), nbytes=4)
    plan = changed(0, reading, fill(0, 1))
    verify.check(plan)
    (sentence,) = hazards(plan.programs[0], target=Target.CPU, bodies=plan.bodies)
    assert "while of op" in sentence
    assert sentence.endswith("reads arena bytes 12 to 16, which nobody wrote")


def test_a_chain_of_bodies_is_refused_where_it_is_deep() -> None:
    links = [replace(BRANCH, bodies=(i,), writes=(whole(16, 8),)) for i in range(1, 40)]
    bodies = (*(program(f"b{i}", link) for i, link in enumerate(links)), program("last", fill(16, 8)))
    main = program("main", fill(8, 8), replace(BRANCH, bodies=(0,)), COPY, role=Role.ENTRY)
    with pytest.raises(PlanInvalidError, match=r"bodies\[16\]: is nested 17 deep, expected at most 16"):
        verify.check(replace(PLAN, programs=(main,), bodies=bodies))


def test_trips_are_limited_by_the_reader() -> None:
    verify.check(PLAN, Limits(trips=9))
    with pytest.raises(PlanInvalidError, match="limit: 9, the limit is 8"):
        verify.check(PLAN, Limits(trips=8))
