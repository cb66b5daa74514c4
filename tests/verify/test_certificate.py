"""The antichain of a plan: never doubted without reason, and no false one believed."""

import tracemalloc

from graphs import graphs, schedules
from hypothesis import given
from hypothesis import strategies as st
from programs import at, planned, with_program, work

from nimblec.base.ir import Graph, Schedule
from nimblec.inspect.certificate import problems
from nimblec.plan.lower import lower
from nimblec.schedule.dag import Dag
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.memory import layout
from nimblec.schedule.streams import certificate, maximal
from nimblert.plan import Candidate, Program, Record, Region, ScheduleRecord, Wait


def record(policy: str, *antichain: int, candidates: tuple[Candidate, ...] = ()) -> ScheduleRecord:
    return ScheduleRecord(
        policy=policy, antichain=antichain, arena_lower_bound_nbytes=0, fewest_sync_count=0, candidates=candidates
    )


def found(program: Program, claim: ScheduleRecord) -> list[str]:
    return list(problems(program, claim))


def positions(dag: Dag, schedule: Schedule) -> tuple[int, ...]:
    """Return the certificate of the graph, in the order in which the schedule issues it."""
    return tuple(sorted(schedule.order.index(task) for task in certificate(dag)))


@given(graphs(), st.integers(0, 1000))
def test_certificate_of_any_graph_is_accepted(model: Graph, seed: int) -> None:
    model = rename_workspaces(model)
    dag = dependencies(model)
    widest = maximal(dag)
    for schedule in [*schedules(dag, seed), widest]:
        program = lower(model, schedule, layout(model, schedule))
        policy = "max" if schedule is widest else "critical-path-3"
        assert found(program, record(policy, *positions(dag, schedule))) == []


@given(graphs(chained=False))
def test_certificate_refuses_ordered_pair(model: Graph) -> None:
    model = rename_workspaces(model)
    dag = dependencies(model)
    schedule = maximal(dag)
    program = lower(model, schedule, layout(model, schedule))
    for before, after in dag.edges:
        pair = sorted((schedule.order.index(before), schedule.order.index(after)))
        assert found(program, record("max", *pair))[0].startswith("antichain: commands[")


SHARED = at(Region.ARENA, 0)
OTHER = at(Region.ARENA, 64)


def test_data_handed_on_orders_under_any_policy() -> None:
    chain = planned(work(0, writes=(SHARED,)), work(0, reads=(SHARED,), writes=(OTHER,)), work(0, reads=(OTHER,)))
    assert found(chain, record("1", 0)) == []
    assert found(chain, record("1", 0, 2)) == ["antichain: commands[2] comes after commands[0] by their accesses"]


def test_arena_bytes_that_change_hands_order_nothing() -> None:
    turns = planned(
        work(0, writes=(SHARED,)), work(0, reads=(SHARED,)), work(0, writes=(SHARED,)), work(0, reads=(SHARED,))
    )
    assert found(turns, record("1", 1, 3)) == []
    assert len(found(turns, record("1", 2, 3))) == 1


def test_state_that_is_read_and_then_written_orders() -> None:
    state = at(Region.STATE, 32)
    program = planned(work(0, reads=(at(Region.STATE, 0),)), work(0, writes=(state,)), work(0, writes=(state,)))
    assert len(found(program, record("1", 0, 1))) == 1
    assert len(found(program, record("1", 1, 2))) == 1
    beside = planned(work(0, reads=(at(Region.STATE, 0, 32),)), work(0, writes=(state,)))
    assert found(beside, record("1", 0, 1)) == []


def test_weights_scratch_memory_and_empty_ranges_order_nothing() -> None:
    weights, empty = at(Region.WEIGHTS, 0), at(Region.STATE, 0, 0)
    program = planned(
        work(0, reads=(weights, empty, SHARED), writes=(SHARED, empty)),
        work(0, reads=(weights, empty, SHARED), writes=(SHARED, empty)),
    )
    assert found(program, record("1", 0, 1)) == []


def test_a_long_antichain_is_judged_in_little_memory() -> None:
    """The members before each command as a set would take gigabytes for as many commands as a plan may have."""
    program = planned(*[work(0)] * 20_000)
    claim = record("1", *range(20_000))
    tracemalloc.start()
    try:
        assert found(program, claim) == []
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_certificate_ignores_event_order() -> None:
    ordered = planned(work(0), Record(stream=0, event=0), Wait(stream=1, event=0), work(1))
    sentence = "antichain: commands[3] comes after commands[0] by their streams and events"
    assert found(ordered, record("max", 0, 1)) == [sentence]
    assert found(planned(work(0), work(1)), record("max-interleaved", 0, 1)) == []


def test_certificate_bounds_streams() -> None:
    sentence = "policy 'max': 2 streams, expected at most 1"
    assert found(planned(work(0), work(1)), record("max", 1)) == [sentence]
    assert found(planned(), record("max")) == []


def test_a_number_of_streams_is_kept() -> None:
    program = planned(work(0), work(1))
    assert found(program, record("2", 0, 1)) == []
    assert found(program, record("1", 0, 1)) == ["policy '1': 2 streams, expected at most 1"]


def test_the_candidate_that_was_kept_is_the_program() -> None:
    tried = (
        Candidate(policy="1", stream_count=1, sync_count=0, arena_nbytes=9),
        Candidate(policy="max", stream_count=2, sync_count=0, arena_nbytes=1024),
    )
    program = planned(work(0), work(1))
    assert found(program, record("max", 0, 1, candidates=tried)) == []
    (sentence,) = found(with_program(program, arena_nbytes=512), record("max", 0, 1, candidates=tried))
    assert sentence.startswith("candidates[1]: streams, syncs and arena are (2, 0, 1024)")
