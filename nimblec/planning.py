"""The choice of a schedule for a captured graph, and the passes before it; both targets share them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nimblec.assembly import Provenance, assemble
from nimblec.errors import CompileError
from nimblec.ir import Graph, KernelWork, Layout, Part, Schedule
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import Dag, transitive_reduction
from nimblec.schedule.dependencies import (
    close_gaps,
    dependencies,
    programmatic_edges,
    rename_workspaces,
    with_programmatic_edges,
)
from nimblec.schedule.launch_order import interleaved
from nimblec.schedule.lifetimes import lifetimes
from nimblec.schedule.matching import maximum_matching
from nimblec.schedule.memory import layout
from nimblec.schedule.recompute import recomputed
from nimblec.schedule.streams import certificate, critical_path, limited, maximal, serial
from nimblert.plan import Candidate, Plan, ScheduleRecord, Target

_AUTO_LIMITS = (2, 4, 8, 16)
_CROSS_EDGE_NS = (500, 1_000, 2_000)
_MOST_GOALS, _CLOSER = 4, 0.97
_NOISE = 0.98  # times nearer to one another than this count as equal


class Timer(Protocol):
    """Measures plans of one program on the device they are for.

    ``max_streams`` is the largest number of streams worth trying there.
    """

    max_streams: int

    def command_durations(self, plan: Plan) -> Sequence[int]:
        """Nanoseconds of each launch, copy and fill of a plan of one stream, in issue order."""

    def duration(self, plan: Plan) -> int:
        """Nanoseconds of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A schedule with its memory layout, and how long a run takes (measured or estimated)."""

    policy: str
    schedule: Schedule
    memory: Layout
    duration_ns: int = 0

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            policy=self.policy,
            stream_count=self.schedule.stream_count,
            sync_count=len(self.schedule.waits),
            arena_nbytes=self.memory.arena_nbytes,
            duration_ns=self.duration_ns,
        )


def make_plan(
    graph: Graph, provenance: Provenance, timer: Timer, *, streams: str = "auto", memory_limit: int | None = None
) -> Plan:
    """The plan of one graph, without a golden record; see `choose_schedule`."""
    part = choose_schedule(graph, provenance, timer, streams=streams, memory_limit=memory_limit)
    return assemble([part], provenance)


def choose_schedule(
    graph: Graph, provenance: Provenance, timer: Timer, *, streams: str = "auto", memory_limit: int | None = None
) -> Part:
    """The graph with the best schedule and memory layout found.

    ``streams``: "1" is the captured order, "max" the paper's Algorithm 1, a number at most so many
    streams, "auto" the fastest of several as ``timer`` measures them, never slower than "1": policies
    "tied-..." keep launches that were captured with a programmatic edge one after the other. Where
    the arena of what was asked for takes more than ``memory_limit`` bytes, the fastest schedule
    that fits is taken; if there is none, tasks are recomputed instead of keeping their results, by policies
    "recompute-..."; CompileError where that does not suffice either.
    """
    graph = close_gaps(rename_workspaces(graph))
    dag = dependencies(graph)
    captured = _try("1", graph, serial(dag))
    durations = timer.command_durations(_timed(graph, captured, provenance))
    graph = replace(graph, tasks=tuple(replace(t, duration_ns=d) for t, d in zip(graph.tasks, durations, strict=True)))
    if streams == "auto":
        graph = _with_faster_edges(graph, captured, provenance, timer)
    tried = [
        captured if policy == captured.policy else _try(policy, graph, schedule)
        for policy, schedule in _schedules(graph, dag, streams, timer.max_streams)
    ]
    fitting = tried
    if memory_limit is not None:
        fitting = _fitting(tried, memory_limit) or _fitting(
            [_try(p, graph, s) for p, s in _schedules(graph, dag, "auto", timer.max_streams)], memory_limit
        )
        if not fitting:
            graph, dag, fitting = _recomputing(graph, captured, memory_limit, timer.max_streams)
    if len(fitting) > 1:
        fitting = [replace(t, duration_ns=timer.duration(_timed(graph, t, provenance))) for t in fitting]
    chosen = _choose(fitting)
    record = ScheduleRecord(
        policy=chosen.policy,
        antichain=_positions(certificate(dag), chosen.schedule),
        arena_lower_bound_nbytes=arena_lower_bound(lifetimes(graph, chosen.schedule)),
        candidates=tuple(t.candidate for t in fitting),
        fewest_sync_count=_fewest_syncs(dag),
    )
    return Part(graph=graph, schedule=chosen.schedule, memory=chosen.memory, record=record)


def _recomputing(graph: Graph, captured: _Tried, memory_limit: int, most: int) -> tuple[Graph, Dag, list[_Tried]]:
    """The graph with recomputed tasks, their order, and schedules within the limit; raises CompileError for none."""
    least, goal = captured.memory.arena_nbytes, memory_limit
    for _ in range(_MOST_GOALS):
        smaller = recomputed(graph, goal)
        dag = dependencies(smaller)
        tried = [_try(f"recompute-{p}", smaller, s) for p, s in _schedules(smaller, dag, "auto", most)]
        if fitting := _fitting(tried, memory_limit):
            return smaller, dag, fitting
        found = min(t.memory.arena_nbytes for t in tried)
        least, goal = min(least, found), int(goal * memory_limit / found * _CLOSER)  # the arena has holes
    raise CompileError(
        f"memory limit: {memory_limit} bytes are too few for the arena, the least found is {least}: allow more"
    )


def _timed(graph: Graph, tried: _Tried, provenance: Provenance) -> Plan:
    """A plan to time.

    On a GPU its launches have no accesses, which may be tens of thousands, and serve only checks of a plan. On the
    CPU they determine which launches form one session.
    """
    if provenance.target is Target.CUDA:
        tasks = (replace(t, reads=(), writes=()) if isinstance(t.work, KernelWork) else t for t in graph.tasks)
        graph = replace(graph, tasks=tuple(tasks))
    return assemble([Part(graph=graph, schedule=tried.schedule, memory=tried.memory)], provenance)


def _with_faster_edges(graph: Graph, captured: _Tried, provenance: Provenance, timer: Timer) -> Graph:
    """The graph without its programmatic edges, if the captured order is faster without them.

    A kernel that starts early takes room on the multiprocessors from those before it.
    """
    if not programmatic_edges(graph):
        return graph
    plain = replace(graph, tasks=tuple(replace(t, programmatic_after=None) for t in graph.tasks))
    early, late = (timer.duration(_timed(g, captured, provenance)) for g in (graph, plain))
    return plain if late < early * _NOISE else graph


def _schedules(graph: Graph, dag: Dag, streams: str, most: int) -> Iterator[tuple[str, Schedule]]:
    """The schedules to try for a policy, the captured order first."""
    durations = [t.duration_ns for t in graph.tasks]
    if streams == "1":
        yield "1", serial(dag)
    elif streams == "max":
        yield "max", maximal(dag, programmatic_edges(graph))
    elif streams != "auto":
        yield streams, limited(dag, int(streams), durations)
    else:
        yield from _automatic(graph, dag, durations, most)
        if programmatic_edges(graph):
            tied = with_programmatic_edges(dag, graph)
            for policy, schedule in _automatic(graph, tied, durations, most):
                if policy != "1":
                    yield f"tied-{policy}", schedule


def _automatic(graph: Graph, dag: Dag, durations: Sequence[int], most: int) -> Iterator[tuple[str, Schedule]]:
    yield "1", serial(dag)
    widest = maximal(dag, programmatic_edges(graph))
    counts = [n for n in _AUTO_LIMITS if n <= most and n < widest.stream_count]
    for count in counts:
        yield str(count), limited(dag, count, durations)
    if 1 < widest.stream_count <= most:
        yield "max", widest
        yield "max-interleaved", interleaved(graph, widest)
    for count in counts[-2:]:
        for cost in _CROSS_EDGE_NS:
            yield f"critical-path-{count}/{cost}ns", critical_path(dag, durations, cost, count)


def _try(policy: str, graph: Graph, schedule: Schedule) -> _Tried:
    return _Tried(policy=policy, schedule=schedule, memory=layout(graph, schedule))


def _fewest_syncs(dag: Dag) -> int:
    """|E'| - |M|: edges of the minimum equivalent graph, less those of a maximum matching of it."""
    reduced = transitive_reduction(dag)
    matched = sum(after is not None for after in maximum_matching(reduced))
    return len(reduced.edges) - matched


def _fitting(tried: Sequence[_Tried], memory_limit: int) -> list[_Tried]:
    return [t for t in tried if t.memory.arena_nbytes <= memory_limit]


def _choose(tried: Sequence[_Tried]) -> _Tried:
    """Of those as fast as the fastest, within the noise, the one with the least memory; the captured order first."""
    fastest = min(t.duration_ns for t in tried)
    as_fast = [t for t in tried if t.duration_ns * _NOISE <= fastest]
    return tried[0] if tried[0] in as_fast else min(as_fast, key=lambda t: (t.memory.arena_nbytes, t.duration_ns))


def _positions(tasks: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    place: Mapping[int, int] = {task: position for position, task in enumerate(schedule.order)}
    return tuple(sorted(place[t] for t in tasks))
