"""Buffers share bytes only if the schedule lets them, and the arena is not much larger than it must be."""

from dataclasses import replace

import pytest
from graphs import access, dataflow, graph, graphs, kernel, schedules, temporaries
from hypothesis import given
from hypothesis import strategies as st

from nimblec.base.ir import Buffer, BufferKind, Graph, KernelWork, Layout, Reference, Schedule, TensorView
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import scheduled_ancestors
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.lifetimes import Lifetimes, lifetimes
from nimblec.schedule.memory import layout, overlaps
from nimblec.schedule.streams import maximal, serial

CHAIN = dataflow((), (0,), (1,), (2,), (3,), sizes=(256,) * 5)
FORK = dataflow((), (0,), (1,), (0,), (3,), (2, 4), sizes=(256,) * 6)


def heaviest_clique(live: Lifetimes) -> int:
    """Return the most bytes of buffers that all conflict, by trying every set."""
    count = len(live.buffers)
    conflicts = live.conflicts
    best = 0
    for chosen in range(1 << count):
        members = [index for index in range(count) if chosen >> index & 1]
        if conflicts[members][:, members].all():
            best = max(best, int(live.sizes[members].sum()))
    return best


@given(graphs(), st.integers(0, 1000))
def test_no_two_live_buffers_overlap(model: Graph, seed: int) -> None:
    model = rename_workspaces(model)
    for schedule in schedules(dependencies(model), seed):
        planned = layout(model, schedule)
        assert list(overlaps(model, schedule, planned)) == []
        assert planned == layout(model, schedule)
        assert planned.arena_nbytes >= arena_lower_bound(lifetimes(model, schedule))


@given(graphs(max_tasks=6), st.integers(0, 1000))
def test_precedence_is_every_use_before_every_use(model: Graph, seed: int) -> None:
    for schedule in schedules(dependencies(model), seed):
        live = lifetimes(model, schedule)
        before = scheduled_ancestors(schedule)
        for row, early in enumerate(live.uses):
            for column, late in enumerate(live.uses):
                expected = all(before[b] >> a & 1 for a in early for b in late)
                assert live.precedes[row, column] == expected


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=8), st.data())
def test_lower_bound_is_heaviest_live_set(sizes: list[int], data: st.DataObject) -> None:
    sources = [tuple(data.draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else () for i in range(len(sizes))]
    model = dataflow(*sources, sizes=tuple(sizes))
    for schedule in schedules(dependencies(model)):
        live = lifetimes(model, schedule)
        assert arena_lower_bound(live) == heaviest_clique(live)


def test_lower_bound_of_more_than_31_bits_is_rounded_down() -> None:
    model = dataflow((), (0,), sizes=(3 << 30, 1 << 30))
    assert arena_lower_bound(lifetimes(model, serial(dependencies(model)))) == 4 << 30
    odd = dataflow((), (0,), sizes=((3 << 30) + 1, (1 << 30) + 1))
    assert arena_lower_bound(lifetimes(odd, serial(dependencies(odd)))) == 4 << 30


def test_a_chain_needs_two_buffers() -> None:
    assert layout(CHAIN, serial(dependencies(CHAIN))).arena_nbytes == 512


def test_buffers_of_concurrent_branches_share_nothing() -> None:
    """Two branches of two tasks: in a row three buffers are alive at most, side by side five."""
    dag = dependencies(FORK)
    assert layout(FORK, serial(dag)).arena_nbytes == 768
    assert layout(FORK, maximal(dag)).arena_nbytes == 1280


def test_a_planted_overlap_is_found() -> None:
    dag = dependencies(FORK)
    planned = layout(FORK, serial(dag))
    assert list(overlaps(FORK, serial(dag), planned)) == []
    found = list(overlaps(FORK, maximal(dag), planned))
    assert found
    assert all("though neither is finished before the other begins" in problem for problem in found)


def test_misplaced_buffers_are_found() -> None:
    schedule = serial(dependencies(CHAIN))
    planned = layout(CHAIN, schedule)
    shifted = replace(planned, offsets=(8, *planned.offsets[1:]))
    assert "buffers 0: offset 8 is no multiple of its alignment 256" in list(overlaps(CHAIN, schedule, shifted))
    assert "buffers 1: ends at 512, beyond its region of 511 bytes" in list(
        overlaps(CHAIN, schedule, replace(planned, arena_nbytes=511))
    )


def test_arena_inputs_and_outputs_are_kept() -> None:
    """What holds an input is there from the start, what holds an output to the end."""
    views = [TensorView(name="x", dtype="uint8", shape=(256,), strides=(1,), buffer=b) for b in (2, 0)]
    tasks = [kernel((), (access(0, 0, 256),)), kernel((access(0, 0, 256),), (access(1, 0, 256),))]
    tasks.append(kernel((access(2, 0, 256), access(1, 0, 256)), ()))
    model = graph(temporaries(256, 256, 256, 256), tasks, inputs=(views[0],), outputs=(views[1],))
    schedule = serial(dependencies(model))
    assert layout(model, schedule).arena_nbytes == 768
    assert layout(replace(model, inputs=(), outputs=()), schedule).arena_nbytes == 512
    clobbered = Layout(offsets=(0, 256, 0, 0), arena_nbytes=768, weights_nbytes=0, state_nbytes=0)
    assert len(list(overlaps(model, schedule, clobbered))) == 1


def test_a_buffer_known_only_by_address_is_in_use() -> None:
    tasks = [kernel((), (access(0, 0, 256),)), kernel((access(0, 0, 256),), ())]
    reference = Reference(param_offset=0, buffer=1, offset=0)
    tasks[0] = replace(tasks[0], work=KernelWork(kernel=0, params=b"", references=(reference,)))
    model = graph(temporaries(256, 256, 256), tasks)
    assert layout(model, serial(dependencies(model))).arena_nbytes == 512


def test_weights_and_state_stand_apart_in_order() -> None:
    kinds = [BufferKind.CONSTANT, BufferKind.STATE, BufferKind.CONSTANT, BufferKind.CONSTANT, BufferKind.INPUT]
    buffers = [Buffer(kind=kind, nbytes=100, alignment=16) for kind in kinds]
    buffers[2] = replace(buffers[2], alignment=1024)
    model = graph(buffers, [kernel(tuple(access(b, 0, 100) for b in (0, 1, 2, 4)), ())])
    planned = layout(model, serial(dependencies(model)))
    assert planned == Layout(offsets=(0, 0, 1024, 0, 0), arena_nbytes=0, weights_nbytes=1124, state_nbytes=100)


def test_alignment_is_honoured() -> None:
    buffers = [Buffer(kind=BufferKind.TEMPORARY, nbytes=100, alignment=n) for n in (16, 512, 64)]
    model = graph(buffers, [kernel((), tuple(access(b, 0, 100) for b in range(3)))])
    planned = layout(model, serial(dependencies(model)))
    assert [offset % buffer.alignment for offset, buffer in zip(planned.offsets, buffers, strict=True)] == [0] * 3


@pytest.mark.parametrize("model", [graph([], []), graph(temporaries(0), [kernel((), (access(0, 0, 0),))])])
def test_nothing_needs_no_arena(model: Graph) -> None:
    schedule: Schedule = serial(dependencies(model))
    assert layout(model, schedule).arena_nbytes == 0
    assert arena_lower_bound(lifetimes(model, schedule)) == 0


def test_memory_of_an_output_is_never_used_again() -> None:
    view = TensorView(name="y", dtype="uint8", shape=(256,), strides=(1,), buffer=0)
    model = graph(
        temporaries(256, 256), [kernel((), (access(0, 0, 256),)), kernel((), (access(1, 0, 256),))], outputs=(view,)
    )
    schedule = serial(dependencies(model))
    reused = Layout(offsets=(0, 0), arena_nbytes=256, weights_nbytes=0, state_nbytes=0)
    (problem,) = overlaps(model, schedule, reused)
    assert problem.startswith("buffers 0 ('') and 1 (''): share arena bytes 0 to 256")
    assert list(overlaps(replace(model, outputs=()), schedule, reused)) == []


def test_arena_holds_unread_inputs() -> None:
    views = [TensorView(name=f"x{b}", dtype="uint8", shape=(256,), strides=(1,), buffer=b) for b in (0, 1)]
    model = graph(temporaries(256, 256), [kernel((access(0, 0, 256),), ())], inputs=tuple(views))
    schedule = serial(dependencies(model))
    live = lifetimes(model, schedule)
    assert live.buffers == (0, 1)
    assert not live.precedes.any()
    assert sorted(layout(model, schedule).offsets) == [0, 256]


def test_memory_of_an_input_is_used_again_after_its_last_reader() -> None:
    view = TensorView(name="x", dtype="uint8", shape=(256,), strides=(1,), buffer=0)
    chain = [kernel((access(b, 0, 256),), (access(b + 1, 0, 256),)) for b in (0, 1)]
    model = graph(temporaries(256, 256, 256), chain, inputs=(view,))
    planned = layout(model, serial(dependencies(model)))
    assert planned.offsets[0] == planned.offsets[2] != planned.offsets[1]
    assert planned.arena_nbytes == 512
