"""What may run at the same time touches nothing that the other writes."""

from dataclasses import replace
from itertools import combinations

from graphs import dataflow, graphs
from hypothesis import given
from hypothesis import strategies as st
from test_streams import schedules

from nimblec.ir import Graph
from nimblec.lower import lower
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import maximal, serial
from nimblert.hazards import hazards, reads, writes
from nimblert.plan import (
    Access,
    Command,
    Launch,
    Memcpy,
    Memset,
    Op,
    Pointer,
    Program,
    Record,
    Region,
    Tensor,
    Wait,
)

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
    return Program(
        name="main",
        inputs=inputs,
        outputs=(),
        input_nbytes=(),
        output_nbytes=(),
        arena_nbytes=1024,
        stream_count=4,
        event_count=4,
        ops=(Op(name="aten.add", source="layer.1"),),
        commands=commands,
    )


def conflicts(checked: Program) -> set[tuple[int, int, Region, int]]:
    """The pairs of commands that conflict, with the region, by comparing all with all."""
    works = [(i, c) for i, c in enumerate(checked.commands) if not isinstance(c, Record | Wait)]
    pairs = set()
    for (i, a), (j, b) in combinations(works, 2):
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
        "commands[1] (launch of aten.add 'layer.1') and commands[2] (launch of aten.add 'layer.1'): nothing "
        "orders their accesses to arena bytes 64 to 72"
    )


def test_an_event_orders() -> None:
    writer = launch(0, writes=((at(Region.ARENA, 0), 64),))
    reader = launch(1, reads=((at(Region.ARENA, 0), 64),))
    ordered = (writer, Record(stream=0, event=0), Wait(stream=1, event=0), reader)
    assert list(hazards(program(*ordered))) == []
    assert len(list(hazards(program(writer, Record(stream=0, event=0), reader)))) == 1


def test_reads_alone_regions_apart_and_touching_ranges_are_no_hazard() -> None:
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
    sentence = "commands[2] (launch of aten.add 'layer.1'): reads arena bytes 16 to 24, which nobody wrote"
    assert found == [sentence]
    both = launch(0, reads=((at(Region.ARENA, 8), 24),), writes=((at(Region.ARENA, 16), 8),))
    assert list(hazards(program(fill, gap, both))) == []
    assert len(list(hazards(program(reader)))) == 1
    tensor = Tensor(name="x", dtype="float32", shape=(8,), strides=(1,), pointer=at(Region.ARENA, 8))
    assert list(hazards(program(reader, inputs=(tensor,)))) == []


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


@given(graphs())
def test_all_pairs_are_found_where_nothing_is_ordered(model: Graph) -> None:
    model = rename_workspaces(model)
    schedule = serial(dependencies(model))
    ordered = lower(model, schedule, layout(model, schedule))
    apart = tuple(replace(command, stream=stream) for stream, command in enumerate(ordered.commands))
    found = [sentence for sentence in hazards(replace(ordered, commands=apart)) if " and " in sentence]
    assert len(found) == len(conflicts(ordered))


def test_memory_reused_too_early_is_found() -> None:
    """The layout of the serial order, run with the concurrency of the maximal one."""
    model = dataflow((), (0,), (1,), (0,), (3,), (2, 4))
    dag = dependencies(model)
    cramped = lower(model, maximal(dag), layout(model, serial(dag)))
    assert any("nothing orders" in sentence for sentence in hazards(cramped))
