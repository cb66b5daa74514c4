"""A scheduled graph becomes the program of a plan."""

from dataclasses import replace

import pytest
from graphs import access, dataflow, graph, kernel, temporaries

from nimblec.base.errors import CompileError
from nimblec.base.ir import (
    Buffer,
    BufferKind,
    CopyWork,
    FillWork,
    KernelWork,
    Layout,
    Reference,
    Schedule,
    Task,
    TensorView,
)
from nimblec.plan.lower import lower, state, weights
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import arrange, serial
from nimblert.plan import Access, Launch, Memcpy, Memset, Op, Pointer, Record, Region, Relocation, Tensor, Wait, Weight


def test_every_kind_of_buffer_finds_its_region() -> None:
    kinds = (
        BufferKind.OUTPUT,
        BufferKind.INPUT,
        BufferKind.CONSTANT,
        BufferKind.TEMPORARY,
        BufferKind.INPUT,
        BufferKind.STATE,
        BufferKind.WORKSPACE,
        BufferKind.OUTPUT,
    )
    buffers = [Buffer(kind=kind, nbytes=8 + index) for index, kind in enumerate(kinds)]
    work = KernelWork(
        kernel=3,
        params=bytes(16),
        references=(Reference(param_offset=8, buffer=4, offset=-2),),
        grid=(2, 1, 1),
        block=(64, 1, 1),
        cluster=(2, 1, 1),
        dynamic_smem_nbytes=128,
        cooperative=True,
    )
    reads = tuple(access(index, 1, 2) for index in range(len(kinds)))
    task = Task(op=0, work=work, reads=reads, writes=(access(7, 0, 4),), duration_ns=500)
    views = tuple(
        TensorView(name=f"t{b}", dtype="int8", shape=(2,), strides=(3,), buffer=b, offset=1, sample_range=(0, 9))
        for b in (4, 5)
    )
    model = graph(buffers, [task], inputs=views, outputs=views[::-1])
    planned = Layout(
        offsets=(0, 0, 256, 512, 0, 1024, 2048, 0), arena_nbytes=4096, weights_nbytes=512, state_nbytes=2048
    )
    program = lower(model, serial(dependencies(model)), planned, name="predict")
    places = (
        (Region.OUTPUT, 0, 0),
        (Region.INPUT, 0, 0),
        (Region.WEIGHTS, 0, 256),
        (Region.ARENA, 0, 512),
        (Region.INPUT, 1, 0),
        (Region.STATE, 0, 1024),
        (Region.ARENA, 0, 2048),
        (Region.OUTPUT, 1, 0),
    )
    assert program.commands == (
        Launch(
            stream=0,
            op=0,
            kernel=3,
            params=bytes(16),
            relocations=(Relocation(param_offset=8, pointer=Pointer(region=Region.INPUT, index=1, offset=-2)),),
            reads=tuple(
                Access(pointer=Pointer(region=region, index=index, offset=offset + 1), nbytes=2)
                for region, index, offset in places
            ),
            writes=(Access(pointer=Pointer(region=Region.OUTPUT, index=1), nbytes=4),),
            grid=(2, 1, 1),
            block=(64, 1, 1),
            cluster=(2, 1, 1),
            dynamic_smem_nbytes=128,
            cooperative=True,
            duration_ns=500,
        ),
    )
    assert (program.name, program.golden, program.arena_nbytes) == ("predict", None, 4096)
    assert (program.input_nbytes, program.output_nbytes) == ((9, 12), (8, 15))
    expected = [
        Tensor(name=name, dtype="int8", shape=(2,), strides=(3,), pointer=pointer, sample_range=(0, 9))
        for name, pointer in (
            ("t4", Pointer(region=Region.INPUT, index=1, offset=1)),
            ("t5", Pointer(region=Region.STATE, offset=1025)),
        )
    ]
    assert [*program.inputs, *program.outputs] == [*expected, *expected[::-1]]


def test_copies_and_fills_become_commands() -> None:
    copy = Task(
        op=0,
        work=CopyWork(dst=access(1, 8, 16), src=access(0, 4, 16)),
        reads=(access(0, 4, 16),),
        writes=(access(1, 8, 16),),
        duration_ns=7,
    )
    fill = Task(
        op=0,
        work=FillWork(dst=access(0, 4, 12), value=3, element_nbytes=4),
        reads=(),
        writes=(access(0, 4, 12),),
        duration_ns=9,
    )
    model = graph(temporaries(64, 64), [copy, fill])
    planned = Layout(offsets=(0, 256), arena_nbytes=320, weights_nbytes=0, state_nbytes=0)
    first, second = (Pointer(region=Region.ARENA, offset=offset) for offset in (4, 264))
    assert lower(model, serial(dependencies(model)), planned).commands == (
        Memcpy(stream=0, op=0, dst=second, src=first, nbytes=16, duration_ns=7),
        Memset(stream=0, op=0, dst=first, value=3, element_nbytes=4, count=3, duration_ns=9),
    )
    odd = replace(fill, work=FillWork(dst=access(0, 4, 13), value=3, element_nbytes=4))
    with pytest.raises(CompileError, match="13 bytes are not a whole number of elements of 4 bytes"):
        lower(replace(model, tasks=(odd,)), serial(dependencies(model)), planned)


def test_events_are_recorded_once_and_waited_for_where_needed() -> None:
    model = dataflow((), (0,), (0,), (1, 2))
    schedule = arrange(dependencies(model), (0, 2, 1, 3), (0, 1, 2, 0))
    program = lower(model, schedule, layout(model, schedule))
    shape = [(type(command).__name__, command.stream, getattr(command, "event", None)) for command in program.commands]
    assert shape == [
        ("Launch", 0, None),
        ("Record", 0, 0),
        ("Wait", 1, 0),
        ("Launch", 1, None),
        ("Record", 1, 1),
        ("Wait", 2, 0),
        ("Launch", 2, None),
        ("Record", 2, 2),
        ("Wait", 0, 1),
        ("Wait", 0, 2),
        ("Launch", 0, None),
    ]
    assert (program.stream_count, program.event_count) == (3, 3)
    assert sum(isinstance(command, Record) for command in program.commands) == 3
    assert [c.event for c in program.commands if isinstance(c, Wait)] == [0, 0, 1, 2]


ORDERS = {
    "captured": (Schedule(order=(0, 1, 2), streams=(0, 0, 1), stream_count=2, waits=((0, 2),)), [False, True, False]),
    "streams": (Schedule(order=(0, 1, 2), streams=(0, 1, 0), stream_count=2, waits=((0, 1),)), [False, False, False]),
    "after another": (Schedule(order=(0, 2, 1), streams=(0, 0, 0), stream_count=1, waits=()), [False, False, True]),
}


@pytest.mark.parametrize("order", ORDERS)
def test_launch_starts_early_after_other_op(order: str) -> None:
    schedule, expected = ORDERS[order]
    tasks = [
        kernel((), (access(0),), op=0),
        kernel((access(0),), (), op=1, programmatic_after=0),
        kernel((access(0),), (), op=2),
    ]
    assert _early(tasks, schedule) == expected


def test_launch_starts_early_after_own_op() -> None:
    tasks = [
        kernel((), (access(0),), op=0),
        kernel((access(0),), (), op=0, programmatic_after=0),
        kernel((access(0),), (), op=1),
    ]
    assert _early(tasks, ORDERS["captured"][0]) == [False, True, False]
    assert _early(tasks, ORDERS["after another"][0]) == [False, False, False]


def test_a_launch_waits_for_the_end_of_a_copy() -> None:
    fill = FillWork(dst=access(0), value=0, element_nbytes=1)
    tasks = [
        kernel((), (), op=0),
        kernel((), (access(0),), op=1, programmatic_after=0),
        Task(op=2, work=fill, reads=(), writes=(access(0),)),
    ]
    schedule = Schedule(order=(0, 2, 1), streams=(0, 0, 0), stream_count=1, waits=())
    assert _early(tasks, schedule) == [False, False]


def _early(tasks: list[Task], schedule: Schedule) -> list[bool]:
    model = graph(temporaries(64), tasks)
    program = lower(model, schedule, layout(model, schedule))
    return [command.programmatic for command in program.commands if isinstance(command, Launch)]


def test_ops_without_tasks_are_left_out() -> None:
    model = graph([], [kernel((), (), op=2), kernel((), (), op=4), kernel((), (), op=2)])
    program = lower(model, serial(dependencies(model)), layout(model, serial(dependencies(model))))
    assert program.ops == (Op(name="op2", source=""), Op(name="op4", source=""))
    assert [command.op for command in program.commands if isinstance(command, Launch)] == [0, 1, 0]


def test_weights_and_state_carry_their_contents() -> None:
    data = memoryview(bytes(range(8)))
    buffers = [
        Buffer(kind=BufferKind.CONSTANT, nbytes=8, name="a", dtype="float32", shape=(2,), data=data),
        Buffer(kind=BufferKind.CONSTANT, nbytes=8, name="unused", data=data),
        Buffer(kind=BufferKind.CONSTANT, nbytes=0, name="empty", data=memoryview(b"")),
        Buffer(kind=BufferKind.STATE, nbytes=4, name="s", dtype="int32", shape=(), data=data[:4]),
        Buffer(kind=BufferKind.CONSTANT, nbytes=8, name="b", dtype="int64", shape=(1,), data=data),
    ]
    model = graph(buffers, [kernel(tuple(access(b, 0, buffers[b].nbytes) for b in (0, 2, 3, 4)), ())])
    planned = layout(model, serial(dependencies(model)))
    assert weights(model, planned) == (
        Weight(name="a", dtype="float32", shape=(2,), offset=0, data=data),
        Weight(name="b", dtype="int64", shape=(1,), offset=256, data=data),
    )
    assert state(model, planned) == (Weight(name="s", dtype="int32", shape=(), offset=0, data=data[:4]),)
    missing = replace(model, buffers=(replace(buffers[0], data=None), *buffers[1:]))
    with pytest.raises(CompileError, match=r"buffers\[0\] 'a': a constant of 8 bytes needs .* found 0"):
        weights(missing, planned)
