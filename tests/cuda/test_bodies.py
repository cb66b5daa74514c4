"""The tasks of a recorded body become a graph of their own, with its own values in its own memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from nimblec.base.ir import (
    Access,
    Buffer,
    BufferKind,
    CopyWork,
    FillWork,
    Graph,
    LoopWork,
    Op,
    SwitchWork,
    Task,
    TensorView,
)
from nimblec.cuda.capture.bodies import RecordedBody, Region, with_bodies
from nimblec.plan.assembly import Provenance, assemble
from nimblec.plan.planning import choose_schedule
from nimblert.check import verify
from nimblert.plan import Device, Plan, Switch, Target, While

X, SLOT, GOING, LOCAL, Y = range(5)
DEVICE = Device(name="GPU", compute_capability=(9, 0), multiprocessor_count=132, driver_version=13000)
PROVENANCE = Provenance(target=Target.CUDA, device=DEVICE, versions=())


def whole(buffer: int) -> Access:
    return Access(buffer=buffer, offset=0, nbytes=1 if buffer == GOING else 64)


def copy(dst: int, src: int) -> Task:
    return Task(op=0, work=CopyWork(dst=whole(dst), src=whole(src)), reads=(whole(src),), writes=(whole(dst),))


def fill(dst: int, value: int) -> Task:
    work = FillWork(dst=whole(dst), value=value, element_nbytes=1)
    return Task(op=0, work=work, reads=(), writes=(whole(dst),))


def recorded(*tasks: Task) -> Graph:
    kinds = (BufferKind.INPUT, BufferKind.TEMPORARY, BufferKind.TEMPORARY, BufferKind.TEMPORARY, BufferKind.OUTPUT)
    views = [
        TensorView(name=name, dtype="uint8", shape=(64,), strides=(1,), buffer=buffer)
        for name, buffer in (("x", X), ("y", Y))
    ]
    return Graph(
        modules=(),
        kernels=(),
        buffers=tuple(Buffer(kind=kind, nbytes=whole(number).nbytes) for number, kind in enumerate(kinds)),
        ops=(Op(name="copy", source="layer"),),
        tasks=tasks,
        inputs=(views[0],),
        outputs=(views[1],),
    )


def plan_of(graph: Graph) -> Plan:
    plan = assemble([choose_schedule(graph, PROVENANCE, None)], PROVENANCE)
    verify.check(plan)
    return plan


def folded(graph: Graph, *regions: Region) -> Graph:
    return with_bodies(graph, regions, lambda node: min(node, len(graph.tasks)), lambda _: whole(GOING))


def test_a_loop_is_one_task_whose_body_keeps_its_own_values() -> None:
    before, after = [copy(SLOT, X), fill(GOING, 1)], [copy(Y, SLOT)]
    body = [copy(LOCAL, SLOT), copy(SLOT, LOCAL), fill(GOING, 0)]
    loop = Region(source="the loop", bodies=[RecordedBody(first=2, end=5)], decider=0, limit=9)
    graph = folded(recorded(*before, *body, *after), loop)
    assert [type(task.work) for task in graph.tasks] == [CopyWork, FillWork, LoopWork, CopyWork]
    assert {access.buffer for access in graph.tasks[2].writes} == {SLOT, GOING}
    inner = graph.bodies[0].graph
    assert [buffer.kind for buffer in inner.buffers].count(BufferKind.TEMPORARY) == 1, "the local value"
    plan = plan_of(graph)
    (command,) = [work for _, work in plan.programs[0].work if isinstance(work, While)]
    assert (command.limit, len(plan.bodies[0].commands)) == (9, 3)


LOCALS = (LOCAL, Y + 1, Y + 2)


def looped(tasks: Sequence[Task]) -> Graph:
    """Return a graph of one loop whose body runs these tasks and ends it."""
    body = [*tasks, fill(GOING, 0)]
    graph = recorded(copy(SLOT, X), fill(GOING, 1), *body, copy(Y, SLOT))
    more = tuple(Buffer(kind=BufferKind.TEMPORARY, nbytes=64) for _ in LOCALS[1:])
    loop = Region(source="", bodies=[RecordedBody(first=2, end=2 + len(body))], decider=0, limit=9)
    return folded(replace(graph, buffers=(*graph.buffers, *more)), loop)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ([(LOCAL, X), (SLOT, LOCAL)], 1),
        ([(LOCAL, X), (Y, SLOT), (SLOT, LOCAL)], 3),
        ([(LOCAL, SLOT), (SLOT, LOCAL)], 2),
        ([(LOCAL, X), (SLOT, LOCAL), (Y, LOCAL)], 2),
    ],
    ids=["unread", "old value read later", "old value read by its writer", "new value read later"],
)
def test_body_computes_values_in_place_of_copies(body: list[tuple[int, int]], left: int) -> None:
    graph = looped([copy(dst, src) for dst, src in body])
    assert len(graph.bodies[0].graph.tasks) == left + 1
    plan_of(graph)


def random_body(seed: int) -> list[Task]:
    """Return fills and copies of halves and wholes, which read local values only where they were written."""
    draw = np.random.default_rng(seed)
    written = {(buffer, half) for buffer in (X, SLOT, Y) for half in (0, 32)}
    tasks = []
    for value in range(draw.integers(2, 10)):
        halves = ((0,), (32,), (0, 32), (0, 32))[draw.integers(4)]
        dst = (SLOT, Y, *LOCALS)[draw.integers(5)]
        sources = [b for b in (X, SLOT, Y, *LOCALS) if b != dst and all((b, half) in written for half in halves)]
        src = sources[draw.integers(len(sources))]
        to, of = (Access(buffer=buffer, offset=halves[0], nbytes=32 * len(halves)) for buffer in (dst, src))
        work = CopyWork(dst=to, src=of) if draw.random() < 0.7 else FillWork(dst=to, value=value, element_nbytes=1)
        tasks.append(Task(op=0, work=work, reads=(of,) if isinstance(work, CopyWork) else (), writes=(to,)))
        written |= {(dst, half) for half in halves}
    return tasks


def run(tasks: Sequence[Task], memory: dict[int, bytearray]) -> None:
    for work in (task.work for task in tasks):
        assert isinstance(work, CopyWork | FillWork)
        value = bytes([work.value]) * work.dst.nbytes if isinstance(work, FillWork) else bytes(
            memory[work.src.buffer][work.src.offset : work.src.offset + work.src.nbytes]
        )
        memory[work.dst.buffer][work.dst.offset : work.dst.offset + work.dst.nbytes] = value


def test_body_without_copies_writes_what_it_did() -> None:
    dropped = 0
    for seed in range(250):
        tasks = random_body(seed)
        graph = looped(tasks)
        plan_of(graph)
        expected = {buffer: bytearray([100 + buffer]) * 64 for buffer in (X, SLOT, GOING, Y, *LOCALS)}
        (body,), work = graph.bodies, graph.tasks[2].work
        assert isinstance(work, LoopWork)
        inner = dict(zip(work.call.buffers, body.outer, strict=True))
        found = {number: bytearray(64) for number in range(len(body.graph.buffers))}
        found |= {number: expected[buffer].copy() for buffer, number in inner.items()}
        untouched = {buffer: value.copy() for buffer, value in expected.items() if buffer not in inner}
        run(tasks, expected)
        run(body.graph.tasks, found)
        for buffer in (X, SLOT, Y):
            assert expected[buffer] == (found[inner[buffer]] if buffer in inner else untouched[buffer]), (seed, buffer)
        dropped += len(tasks) + 1 - len(body.graph.tasks)
    assert dropped > 20


def test_each_branch_has_its_body_and_bodies_nest() -> None:
    tasks = [copy(SLOT, X), fill(GOING, 1), fill(Y, 1), fill(Y, 2), copy(Y, SLOT), fill(GOING, 0)]
    branch = Region(
        source="a branch", bodies=[RecordedBody(first=2, end=3), RecordedBody(first=3, end=5)], decider=0
    )
    graph = folded(recorded(*tasks[:-1]), branch)
    assert [type(task.work) for task in graph.tasks] == [CopyWork, FillWork, SwitchWork]
    assert [len(body.graph.tasks) for body in graph.bodies] == [1, 2]
    plan_of(graph)
    loop = Region(source="", bodies=[RecordedBody(first=2, end=6, regions=[branch])], decider=0, limit=1)
    nested = folded(recorded(*tasks), loop)
    (outer,) = nested.bodies
    assert len(outer.graph.bodies) == 2
    plan = plan_of(nested)
    assert len(plan.bodies) == 3
    assert any(isinstance(work, Switch) for _, work in plan.bodies[0].work)


def test_a_graph_without_regions_stays_as_it_is() -> None:
    graph = recorded(copy(Y, X))
    assert folded(graph) is graph
