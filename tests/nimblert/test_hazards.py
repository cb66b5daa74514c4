"""What may run at the same time touches nothing that the other writes."""

import time
from dataclasses import replace
from itertools import combinations

import pytest
from graphs import dataflow, graphs, schedules
from hypothesis import given
from hypothesis import strategies as st
from programs import planned

from nimblec.base.ir import Graph
from nimblec.plan.lower import lower
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import maximal, serial
from nimblert.check.hazards import hazards
from nimblert.cuda.graph import edges
from nimblert.plan import (
    Access,
    Command,
    Launch,
    Memcpy,
    Memset,
    Pointer,
    Program,
    Record,
    Region,
    Target,
    Tensor,
    Wait,
)
from nimblert.plan.pieces import reads, writes

FORK = dataflow((), (0,), (0,), (1, 2))


def at(region: Region, offset: int, index: int = 0) -> Pointer:
    return Pointer(region=region, index=index, offset=offset)


def launch(
    stream: int, reads: tuple[tuple[Pointer, int], ...] = (), writes: tuple[tuple[Pointer, int], ...] = ()
) -> Launch:
    return Launch(
        stream=stream,
        op=0,
        kernel=0,
        params=b"",
        relocations=(),
        reads=tuple(Access(pointer=pointer, nbytes=nbytes) for pointer, nbytes in reads),
        writes=tuple(Access(pointer=pointer, nbytes=nbytes) for pointer, nbytes in writes),
    )


def program(*commands: Command, inputs: tuple[Tensor, ...] = ()) -> Program:
    return planned(*commands, inputs=inputs, stream_count=4, event_count=4)


def unordered(checked: Program) -> set[tuple[int, int, Region, int]]:
    """Return the works that conflict and that no edge orders, with the region, by comparing all with all."""
    works = [command for command in checked.commands if not isinstance(command, Record | Wait)]
    before: list[set[int]] = []
    for row in edges(checked.commands):
        before.append({edge.source for edge in row}.union(*(before[edge.source] for edge in row)))
    pairs = set()
    for (i, a), (j, b) in combinations(enumerate(works), 2):
        if i in before[j]:
            continue
        touching = [(x, y) for x in writes(a) for y in (*reads(b), *writes(b))]
        touching += [(x, y) for x in reads(a) for y in writes(b)]
        for x, y in touching:
            region = x.pointer.region, x.pointer.index
            same = region == (y.pointer.region, y.pointer.index)
            low = max(x.pointer.offset, y.pointer.offset)
            if same and low < min(x.pointer.offset + x.nbytes, y.pointer.offset + y.nbytes):
                pairs.add((i, j, *region))
    return pairs


def test_a_pair_is_named_with_commands_ops_and_bytes() -> None:
    writer = launch(0, writes=((at(Region.ARENA, 64), 64),))
    reader = launch(1, reads=((at(Region.ARENA, 96), 64), (at(Region.ARENA, 64), 8)))
    other = launch(1, writes=((at(Region.ARENA, 128), 64),))
    (sentence,) = hazards(program(other, writer, reader))
    assert sentence == (
        "commands[1] (launch of aten.add.Tensor 'layer.1') and commands[2] (launch of aten.add.Tensor 'layer.1'): "
        "nothing orders their accesses to arena bytes 64 to 72"
    )


def test_an_event_orders() -> None:
    writer = launch(0, writes=((at(Region.ARENA, 0), 64),))
    reader = launch(1, reads=((at(Region.ARENA, 0), 64),))
    ordered = (writer, Record(stream=0, event=0), Wait(stream=1, event=0), reader)
    assert list(hazards(program(*ordered))) == []
    assert len(list(hazards(program(writer, Record(stream=0, event=0), reader)))) == 1


def test_hazards_need_a_shared_write() -> None:
    same = (at(Region.INPUT, 0, 0), 64)
    assert list(hazards(program(launch(0, reads=(same,)), launch(1, reads=(same,))))) == []
    other = (at(Region.INPUT, 0, 1), 64)
    assert list(hazards(program(launch(0, writes=(same,)), launch(1, writes=(other,))))) == []
    halves = [(at(Region.STATE, 0), 32), (at(Region.STATE, 32), 32)]
    assert list(hazards(program(launch(0, writes=(halves[0],)), launch(1, writes=(halves[1],))))) == []


def test_copies_and_fills_count() -> None:
    copy = Memcpy(stream=0, op=0, dst=at(Region.OUTPUT, 0, 1), src=at(Region.INPUT, 8), nbytes=16)
    fill = Memset(stream=1, op=0, dst=at(Region.OUTPUT, 12, 1), value=0, element_nbytes=4, count=3)
    over = Memset(stream=2, op=0, dst=at(Region.INPUT, 0), value=0, element_nbytes=2, count=5)
    found = list(hazards(program(copy, fill, over)))
    assert [sentence.split(": ")[1] for sentence in found] == [
        "nothing orders their accesses to input 0 bytes 8 to 10",
        "nothing orders their accesses to output 1 bytes 12 to 16",
    ]


def test_arena_bytes_that_nobody_wrote_are_named() -> None:
    fill = Memset(stream=0, op=0, dst=at(Region.ARENA, 0), value=0, element_nbytes=1, count=16)
    gap = Memset(stream=0, op=0, dst=at(Region.ARENA, 24), value=0, element_nbytes=1, count=16)
    reader = launch(0, reads=((at(Region.ARENA, 8), 24), (at(Region.WEIGHTS, 0), 8)))
    found = list(hazards(program(fill, gap, reader)))
    sentence = "commands[2] (launch of aten.add.Tensor 'layer.1'): reads arena bytes 16 to 24, which nobody wrote"
    assert found == [sentence]
    both = launch(0, reads=((at(Region.ARENA, 8), 24),), writes=((at(Region.ARENA, 16), 8),))
    assert list(hazards(program(fill, gap, both))) == []
    assert len(list(hazards(program(reader)))) == 1
    tensor = Tensor(name="x", dtype="float32", shape=(8,), strides=(1,), pointer=at(Region.ARENA, 8))
    assert list(hazards(program(reader, inputs=(tensor,)))) == []


def test_hazards_names_reads_of_unwritten_bytes_on_the_cpu() -> None:
    """A command that works in place reads first, and an OUTPUT region keeps what the run before left there."""
    fill = Memset(stream=0, op=0, dst=at(Region.ARENA, 0), value=0, element_nbytes=1, count=16)
    in_place = launch(0, reads=((at(Region.ARENA, 8), 16),), writes=((at(Region.ARENA, 8), 16),))
    copy = Memcpy(stream=0, op=0, dst=at(Region.OUTPUT, 0, 1), src=at(Region.OUTPUT, 8), nbytes=8)
    y = Tensor(name="y", dtype="float32", shape=(4,), strides=(1,), pointer=at(Region.ARENA, 8))
    z = Tensor(name="z", dtype="float32", shape=(4,), strides=(1,), pointer=at(Region.OUTPUT, 0, 1))
    checked = replace(program(fill, in_place, copy), outputs=(y, z))
    assert list(hazards(checked, target=Target.CPU)) == [
        "commands[1] (launch of aten.add.Tensor 'layer.1'): reads arena bytes 16 to 24, which nobody wrote",
        "commands[2] (memcpy of aten.add.Tensor 'layer.1'): reads output 0 bytes 8 to 16, which nobody wrote",
        "output 'z': returns output 1 bytes 8 to 16, which nobody wrote",
    ]
    assert list(hazards(checked)) == []
    filled = [replace(fill, dst=at(Region.OUTPUT, 0, index)) for index in (0, 1)]
    sound = replace(checked, commands=(replace(fill, count=24), *filled, in_place, copy))
    assert list(hazards(sound, target=Target.CPU)) == []


@given(graphs(), st.integers(0, 1000))
def test_a_lowered_schedule_has_none(model: Graph, seed: int) -> None:
    model = rename_workspaces(model)
    for schedule in schedules(dependencies(model), seed):
        assert list(hazards(lower(model, schedule, layout(model, schedule)))) == []


@given(graphs(chained=False))
def test_every_missing_wait_is_found(model: Graph) -> None:
    model = rename_workspaces(model)
    schedule = maximal(dependencies(model))
    whole = lower(model, schedule, layout(model, schedule))
    for place, command in enumerate(whole.commands):
        if isinstance(command, Wait):
            broken = replace(whole, commands=whole.commands[:place] + whole.commands[place + 1 :])
            assert list(hazards(broken))


@given(graphs(), st.integers(0, 1000), st.data())
def test_hazards_match_all_pairs(model: Graph, seed: int, data: st.DataObject) -> None:
    """Waits are left out and commands moved to other streams, so that most programs are broken somewhere."""
    model = rename_workspaces(model)
    for schedule in schedules(dependencies(model), seed):
        whole = lower(model, schedule, layout(model, schedule))
        kept = [c for c in whole.commands if not isinstance(c, Wait) or data.draw(st.booleans())]
        moved = [c if data.draw(st.integers(0, 4)) else replace(c, stream=data.draw(st.integers(0, 5))) for c in kept]
        broken = replace(whole, commands=tuple(moved), stream_count=6)
        named = {sentence.split(": nothing orders")[0] for sentence in hazards(broken) if " and " in sentence}
        assert bool(named) == bool(unordered(broken))
        assert len(named) <= len(unordered(broken))


def test_memory_reused_too_early_is_found() -> None:
    """The layout of the serial order, run with the concurrency of the maximal one."""
    model = dataflow((), (0,), (1,), (0,), (3,), (2, 4))
    dag = dependencies(model)
    cramped = lower(model, maximal(dag), layout(model, serial(dag)))
    assert any("nothing orders" in sentence for sentence in hazards(cramped))


def fill(stream: int, offset: int, nbytes: int = 64) -> Memset:
    return Memset(stream=stream, op=0, dst=at(Region.ARENA, offset), value=0, element_nbytes=1, count=nbytes)


def network(count: int) -> Program:
    """Return layers of four launches on four streams; each reads what two of the layer before wrote."""
    commands: list[Command] = [fill(stream, 64 * stream) for stream in range(4)]
    events = 0
    for layer in range(count // 4):
        here, there = 64 * 4 * (layer % 8), 64 * 4 * ((layer + 1) % 8)
        meeting = [Record(stream=stream, event=events + stream) for stream in range(4)]
        waits = [Wait(stream=(stream + 1) % 4, event=events + stream) for stream in range(4)]
        again = [Record(stream=stream, event=events + 4 + stream) for stream in range(4)]
        more = [Wait(stream=(stream + 2) % 4, event=events + 4 + stream) for stream in range(4)]
        commands += [*meeting, *waits, *again, *more]
        events += 8
        for stream in range(4):
            read = tuple((at(Region.ARENA, here + 64 * ((stream + i) % 4)), 64) for i in range(2))
            commands.append(launch(stream, reads=read, writes=((at(Region.ARENA, there + 64 * stream), 64),)))
    return replace(program(*commands), arena_nbytes=1 << 20, event_count=events)


def timed(checked: Program, most_s: float) -> list[str]:
    """Return the hazards of a program, found in the time allowed (this machine may be busy)."""
    begin = time.process_time()
    found = list(hazards(checked))
    seconds = time.process_time() - begin
    print(f"{len(checked.commands):,} commands: {seconds:.2f} s")  # noqa: T201 - shown by `pytest -s`
    assert seconds < most_s
    return found


def test_hazards_judge_large_plan_in_time() -> None:
    assert timed(network(30_000), 20) == []
    assert timed(program(*(fill(0, 64 * i) for i in range(100_000))), 20) == []


def test_hazards_find_large_break_in_time() -> None:
    whole = network(30_000)
    place = next(i for i, command in enumerate(whole.commands) if i > 60_000 and isinstance(command, Wait))
    assert timed(replace(whole, commands=whole.commands[:place] + whole.commands[place + 1 :]), 20)


HOSTILE = {
    "three thousand conflicting fills": lambda: [fill(i % 1000, 0) for i in range(3000)],
    "a hundred thousand accesses to the same bytes": lambda: [fill(i % 2, 0) for i in range(100_000)],
    "a hundred thousand reads of the same bytes, and a write": lambda: [
        *(launch(i % 4, reads=((at(Region.STATE, 0), 64),)) for i in range(100_000)),
        launch(5, writes=((at(Region.STATE, 0), 64),)),
    ],
    "as many streams as may be": lambda: [fill(i % 1024, 0, 1 + i) for i in range(20_000)],
    "many events": lambda: [
        command
        for i in range(30_000)
        for command in (fill(i % 64, 0), Record(stream=i % 64, event=i), Wait(stream=(i * 7 + 1) % 64, event=i))
    ],
    "nested ranges": lambda: [fill(i % 2, i, 2 * (2000 - i)) for i in range(2000)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_judged_in_time_and_named_by_a_hundred_sentences_at_most(name: str) -> None:
    assert 0 < len(timed(program(*HOSTILE[name]()), 30)) <= 100


def test_what_is_too_entangled_to_judge_is_refused_at_once() -> None:
    tiles = [fill(0, 64 * i) for i in range(10_000)]
    covers = [fill(1, 0, 640_000) for _ in range(10_000)]
    (sentence,) = timed(program(*tiles, *covers), 10)
    assert sentence == "the accesses of its commands fall into 100010000 pieces, the limit is 16777216"


def test_waits_in_a_row_and_events_of_events_carry_the_order_on() -> None:
    write, read = launch(0, writes=((at(Region.STATE, 0), 8),)), launch(3, reads=((at(Region.STATE, 0), 8),))
    chain = (
        write,
        Record(stream=0, event=0),
        Wait(stream=1, event=0),
        Record(stream=1, event=1),
        Wait(stream=2, event=1),
        launch(2),
        Record(stream=2, event=2),
        launch(1),
        Record(stream=1, event=3),
        Wait(stream=3, event=3),
        Wait(stream=3, event=2),
        read,
    )
    assert list(hazards(program(*chain))) == []
    without = [command for command in chain if not (isinstance(command, Wait) and command.stream == 3)]
    assert len(list(hazards(program(*without)))) == 1
    late = (write, Record(stream=1, event=0), Wait(stream=3, event=0), read)  # marks nothing: stream 1 is empty
    assert len(list(hazards(program(*late)))) == 1


@pytest.mark.parametrize("marked", [True, False], ids=["an event", "earlier work"])
def test_a_later_wait_orders_nothing_that_came_before_it(marked: bool) -> None:
    """Stream 0 waits twice: what it did in between, or marked with an event, is not ordered after the second write."""
    writes = [launch(stream, writes=((at(Region.STATE, 8 * stream), 8),)) for stream in (1, 2)]
    read = launch(3 if marked else 0, reads=((at(Region.STATE, 16), 8),))
    between = (Record(stream=0, event=2),) if marked else (read,)
    after = (Wait(stream=3, event=2), read) if marked else ()
    chain = (
        *(command for work in writes for command in (work, Record(stream=work.stream, event=work.stream - 1))),
        Wait(stream=0, event=0),
        *between,
        Wait(stream=0, event=1),
        *after,
    )
    assert len(list(hazards(program(*chain)))) == 1
