"""Schedules keep the order they must, and cost no more streams and waits than they have to."""

from dataclasses import replace
from itertools import combinations

import pytest
from graphs import dataflow, graphs, schedules
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import random_schedule

from nimblec.base.ir import Graph, Schedule
from nimblec.schedule.check import problems
from nimblec.schedule.dag import Dag, ancestors, scheduled_ancestors, transitive_reduction
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.estimates import simulate
from nimblec.schedule.matching import maximum_matching
from nimblec.schedule.streams import (
    _alternating,
    arrange,
    certificate,
    critical_path,
    interleaved,
    limited,
    maximal,
    serial,
)

DIAMOND = Dag(predecessors=((), (0,), (0,), (1, 2)))


@st.composite
def dags(draw: st.DrawFn, max_tasks: int = 12) -> Dag:
    """Draw random graphs with every density of edges."""
    count = draw(st.integers(0, max_tasks))
    edges = draw(st.sets(st.sampled_from([*combinations(range(count), 2)]))) if count > 1 else set()
    return Dag(predecessors=tuple(tuple(a for a in range(b) if (a, b) in edges) for b in range(count)))


def largest_matching(edges: list[tuple[int, int]]) -> int:
    """Return the size of a maximum matching, by trying every choice."""
    if not edges:
        return 0
    (before, after), *rest = edges
    compatible = [(b, a) for b, a in rest if b != before and a != after]
    return max(largest_matching(rest), 1 + largest_matching(compatible))


def width(dag: Dag) -> int:
    """Return the size of the largest antichain, by trying every set."""
    before = ancestors(dag)
    best = 0
    for tasks in range(1 << dag.task_count):
        chosen = [task for task in range(dag.task_count) if tasks >> task & 1]
        if not any(before[task] & tasks for task in chosen):
            best = max(best, len(chosen))
    return best


@given(dags(max_tasks=8))
def test_matching_is_as_large_as_any(dag: Dag) -> None:
    reduced = transitive_reduction(dag)
    matched = [(before, after) for before, after in enumerate(maximum_matching(reduced)) if after is not None]
    assert set(matched) <= set(reduced.edges)
    assert len({after for _, after in matched}) == len(matched) == largest_matching(list(reduced.edges))


@given(dags(max_tasks=8), st.data())
def test_preferred_edges_cost_nothing(dag: Dag, data: st.DataObject) -> None:
    reduced = transitive_reduction(dag)
    preferred = data.draw(st.sets(st.sampled_from(reduced.edges))) if reduced.edges else set()
    matched = {(before, after) for before, after in enumerate(maximum_matching(reduced, preferred)) if after}
    assert matched <= set(reduced.edges)
    assert len({after for _, after in matched}) == len(matched) == largest_matching(list(reduced.edges))
    assert list(problems(dag, maximal(dag, preferred), certificate(dag))) == []


@pytest.mark.parametrize("branch", [1, 2])
def test_preferred_edges_stay_within_a_stream(branch: int) -> None:
    schedule = maximal(DIAMOND, [(0, branch)])
    assert schedule.streams[0] == schedule.streams[branch]
    assert (schedule.stream_count, len(schedule.waits)) == (2, 2)


@given(dags(max_tasks=8))
def test_maximal_uses_as_many_streams_as_tasks_can_run_at_once(dag: Dag) -> None:
    assert maximal(dag).stream_count == len(certificate(dag)) == width(dag)


@given(dags())
def test_maximal_orders_exactly_what_must_be_ordered(dag: Dag) -> None:
    schedule = maximal(dag)
    assert scheduled_ancestors(schedule) == ancestors(dag)
    assert list(problems(dag, schedule, certificate(dag))) == []
    reduced = transitive_reduction(dag)
    matched = sum(after is not None for after in maximum_matching(reduced))
    assert len(schedule.waits) >= len(reduced.edges) - matched


@given(dags(), st.integers(0, 1000))
def test_every_policy_respects_the_dependencies(dag: Dag, seed: int) -> None:
    for schedule in schedules(dag, seed):
        assert list(problems(dag, schedule)) == []
        derived = scheduled_ancestors(schedule)
        assert all(must & ~does == 0 for must, does in zip(ancestors(dag), derived, strict=True))
        assert set(schedule.streams) == set(range(schedule.stream_count))
    assert schedules(dag, seed) == schedules(dag, seed)


@given(dags(), st.integers(1, 4))
def test_policies_stay_within_their_streams(dag: Dag, n: int) -> None:
    durations = [100] * dag.task_count
    assert limited(dag, n, durations).stream_count <= n
    assert critical_path(dag, durations, 0, n).stream_count <= n


@given(dags())
def test_no_wait_can_be_left_out(dag: Dag) -> None:
    for schedule in schedules(dag)[1:]:
        for left_out in schedule.waits:
            waits = tuple(wait for wait in schedule.waits if wait != left_out)
            broken = Schedule(
                order=schedule.order, streams=schedule.streams, stream_count=schedule.stream_count, waits=waits
            )
            assert any("has ended" in problem for problem in problems(dag, broken))


def test_waits_reach_the_formula_of_the_paper() -> None:
    """An inception block: four branches of 1, 2, 3 and 2 tasks between an input and a concatenation."""
    dag = dependencies(dataflow((), (0,), (0,), (2,), (0,), (4,), (5,), (0,), (7,), (1, 3, 6, 8)))
    schedule = maximal(dag)
    matched = 10 - 4  # four chains of ten tasks
    assert len(transitive_reduction(dag).edges) == 12
    assert (schedule.stream_count, len(schedule.waits)) == (4, 12 - matched)


def test_chains_that_follow_one_another_share_a_stream() -> None:
    """Two diamonds in a row are four chains of the paper, but two at most run at once."""
    dag = Dag(predecessors=((), (0,), (0,), (1, 2), (3,), (3,), (4, 5)))
    assert sum(after is None for after in maximum_matching(dag)) == 3
    assert maximal(dag).stream_count == 2


def test_fewest_streams_may_cost_a_wait_more_than_the_formula() -> None:
    """A graph, found by chance, in which no maximum matching of the reduction joins to four chains."""
    dag = Dag(predecessors=((), (), (), (), (0, 2, 3), (1, 2), (5,), (1, 4), (4,), (5,), (8,)))
    matched = sum(after is not None for after in maximum_matching(dag))
    schedule = maximal(dag)
    assert (schedule.stream_count, len(schedule.waits)) == (4, len(dag.edges) - matched + 1)


def test_a_false_certificate_is_refused() -> None:
    schedule = maximal(DIAMOND)
    assert list(problems(DIAMOND, schedule, (1, 2))) == []
    assert list(problems(DIAMOND, schedule, (1,))) == ["antichain: 1 tasks do not prove 2 streams fewest"]
    assert list(problems(DIAMOND, schedule, (0, 2))) == ["antichain: task 0 comes before task 2"]
    wide = arrange(Dag(predecessors=((), (0,), (1,))), (0, 1, 2), (0, 0, 0))
    extra = Schedule(order=wide.order, streams=(0, 0, 1), stream_count=2, waits=((0, 2), (1, 2)))
    dag = Dag(predecessors=((), (0,), (0, 1)))
    assert "waits: (0, 2) is no edge of the reduced graph" in list(problems(dag, extra, (0, 1)))


def test_a_broken_order_is_refused() -> None:
    backwards = Schedule(order=(1, 0), streams=(0, 1), stream_count=2, waits=((0, 1),))
    dag = Dag(predecessors=((), (0,)))
    assert "issued before task 0" in next(problems(dag, backwards))
    twice = Schedule(order=(0, 0), streams=(0, 0), stream_count=1, waits=())
    assert list(problems(dag, twice)) == ["order: must list each of the 2 tasks once"]


def test_simulate_counts_edges_between_streams() -> None:
    durations = (10, 20, 30, 40)
    assert simulate(serial(DIAMOND), durations) == 100
    assert simulate(maximal(DIAMOND), durations) == 80
    aside = arrange(DIAMOND, range(4), (0, 0, 1, 0))
    assert simulate(aside, durations, edge_ns=5) == 10 + 5 + 30 + 5 + 40
    assert simulate(serial(Dag(predecessors=())), ()) == 0


def test_critical_path_starts_the_longest_path_first() -> None:
    """Three short tasks come before the long one in captured order, and two streams are free."""
    dag = Dag(predecessors=((), (), (), (), (3,)))
    durations = (10, 10, 10, 30, 30)
    listed = critical_path(dag, durations, 0, 2)
    assert listed.order[0] == 3
    assert simulate(listed, durations) == 60
    assert simulate(limited(dag, 2, durations), durations) > 60


def test_critical_path_stays_on_a_stream_when_edges_are_dear() -> None:
    durations = (10, 20, 30, 40)
    assert critical_path(DIAMOND, durations, 0, 2).stream_count == 2
    assert critical_path(DIAMOND, durations, 1000, 2).stream_count == 1


@given(graphs())
def test_interleaving_changes_only_the_order_of_issue(model: Graph) -> None:
    dag = dependencies(model)
    schedule = maximal(dag)
    issued = interleaved(model, schedule)
    assert (issued.streams, issued.waits) == (schedule.streams, schedule.waits)
    assert list(problems(dag, issued, certificate(dag))) == []


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_differ_by_seed_only(seed: int) -> None:
    dag = Dag(predecessors=((),) * 20)
    assert random_schedule(dag, seed) == random_schedule(dag, seed)
    assert random_schedule(dag, seed) != random_schedule(dag, seed + 1)


def test_kinds_alternate_and_the_least_demand_comes_first() -> None:
    kinds = [False, False, False, True, True]
    assert _alternating(((),) * 5, kinds, [3, 1, 2, 9, 8]) == (1, 4, 2, 3, 0)
    assert _alternating(((), (0,), (0,), (0,)), [False, False, True, True], [1, 1, 7, 5]) == (0, 3, 1, 2)


def test_the_median_task_counts_as_memory_bound() -> None:
    model = dataflow((), (), ())
    durations = (64, 64, 128)  # bytes for each ns: 1, 1, 0.5
    tasks = tuple(replace(task, duration_ns=ns) for task, ns in zip(model.tasks, durations, strict=True))
    model = replace(model, tasks=tasks)
    assert interleaved(model, maximal(dependencies(model))).order == (2, 0, 1)
