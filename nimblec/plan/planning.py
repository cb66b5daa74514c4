"""The choice of a schedule for a captured graph, and the passes before it; both targets share them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from nimblec.base.errors import CompileError
from nimblec.base.ir import (
    BUSY,
    Access,
    Body,
    BodyCall,
    Buffer,
    BufferKind,
    Graph,
    KernelWork,
    Layout,
    LoopWork,
    Part,
    Schedule,
    SwitchWork,
    Task,
    calls_of,
)
from nimblec.plan.assembly import Provenance, assemble
from nimblec.schedule import estimates
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import Dag, transitive_reduction
from nimblec.schedule.dependencies import (
    close_gaps,
    dependencies,
    programmatic_edges,
    rename_workspaces,
    with_programmatic_edges,
)
from nimblec.schedule.lifetimes import lifetimes
from nimblec.schedule.matching import maximum_matching
from nimblec.schedule.memory import layout
from nimblec.schedule.recompute import recomputed
from nimblec.schedule.streams import certificate, critical_path, interleaved, limited, maximal, serial
from nimblert.plan import Candidate, Plan, ScheduleRecord

_AUTO_LIMITS = (2, 4, 8, 16)
_CROSS_EDGE_NS = (500, 1_000, 2_000)
_MOST_GOALS, _CLOSER = 4, 0.97
_ESTIMATED_GAIN = 0.05
_POWER_OF_MEMORY = 0.2
"""What memory counts for beside time: a schedule that doubles the memory of a process must save 13 % of its time."""
_PROCESS_NBYTES = 1 << 28
"""What a process takes without the plan, such as the context of a GPU."""

T = TypeVar("T")


class Measured(NamedTuple, Generic[T]):
    """A measurement in nanoseconds. One that ``is_noisy`` was disturbed by other work and may be too long."""

    ns: T
    is_noisy: bool = False


class Timer(Protocol):
    """Measures plans of one program on the device they are for.

    ``max_streams`` is the largest number of streams worth trying there, ``least_gain`` the part of a time that another
    schedule must save: a smaller gain may be noise.
    """

    max_streams: int
    least_gain: float

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        """Measure each launch, copy and fill of a plan of one stream, in issue order."""

    def duration(self, plan: Plan) -> Measured[int]:
        """Measure one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A schedule, the memory layout of the graph that is joined by it, and how long a run takes."""

    policy: str
    schedule: Schedule
    memory: Layout
    duration_ns: int = 0
    is_noisy: bool = False

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            policy=self.policy,
            stream_count=self.schedule.stream_count,
            sync_count=len(self.schedule.waits),
            arena_nbytes=self.memory.arena_nbytes,
            duration_ns=self.duration_ns,
        )


Join: TypeAlias = Callable[[Graph, Schedule], tuple[Graph, Schedule]]
"""Joins consecutive tasks of each stream of a schedule into one, where the target runs them faster."""


def _as_it_is(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    return graph, schedule


def choose_schedule(
    graph: Graph,
    provenance: Provenance,
    timer: Timer | None,
    *,
    streams: str = "auto",
    memory_limit: int | None = None,
    join: Join = _as_it_is,
) -> Part:
    """Return the graph, joined by the best schedule found, with schedule and memory layout.

    ``streams``: "1" is the captured order, "max" the paper's Algorithm 1, a number at most so many streams, "auto" the
    best in time and memory by ``timer``; where times are noisy, it is the captured order, with a note.
    Policies "tied-..." keep launches with a captured programmatic edge one after the other. Without a ``timer``
    estimates decide, and equal graphs give equal results. If the arena exceeds ``memory_limit`` bytes, the best
    schedule that fits is taken, or tasks are recomputed by policies "recompute-..."; else raises CompileError.
    """
    graph = close_gaps(rename_workspaces(schedule_bodies(graph, join)))
    dag = dependencies(graph)
    captured = _try("1", graph, serial(dag), join)
    if timer is None:
        most, least_gain = estimates.MACHINES[provenance.target].max_streams, _ESTIMATED_GAIN
        durations: Sequence[int] = estimates.command_ns(graph, provenance.target)
    else:
        most, least_gain = timer.max_streams, timer.least_gain
        apart = captured if join is _as_it_is else _try("1", graph, serial(dag))
        durations = timer.command_durations(_timed(graph, apart, provenance)).ns
    graph = _with_durations(graph, durations)
    if streams == "auto" and timer is not None:
        graph = _with_faster_edges(graph, captured, provenance, timer)
    tried = [
        captured if policy == captured.policy else _try(policy, graph, schedule, join)
        for policy, schedule in _schedules(graph, dag, streams, most)
    ]
    fitting = tried
    if memory_limit is not None:
        fitting = _fitting(graph, tried, memory_limit, join) or _fitting(
            graph, [_try(p, graph, s, join) for p, s in _schedules(graph, dag, "auto", most)], memory_limit, join
        )
        if not fitting:
            graph, dag, fitting = _recomputing(graph, captured, memory_limit, most, join)
    if len(fitting) > 1:
        fitting = _with_times(graph, fitting, provenance, timer, join)
    chosen = _choose(graph, fitting, least_gain)
    notes = (BUSY,) if chosen is fitting[0] and any(t.is_noisy for t in fitting) else ()
    if timer is None:
        graph = _with_durations(graph, [0] * len(graph.tasks))
        fitting = [replace(t, duration_ns=0) for t in fitting]
    graph, schedule = join(graph, chosen.schedule)
    dag = dag if join is _as_it_is else dependencies(graph)
    places = {task: position for position, task in enumerate(schedule.order)}
    record = ScheduleRecord(
        policy=chosen.policy,
        antichain=tuple(sorted(places[task] for task in certificate(dag))),
        arena_lower_bound_nbytes=arena_lower_bound(lifetimes(graph, schedule)),
        candidates=tuple(t.candidate for t in fitting),
        fewest_sync_count=_fewest_syncs(dag),
    )
    return Part(graph=graph, schedule=schedule, memory=chosen.memory, record=record, notes=notes)


def schedule_bodies(graph: Graph, join: Join) -> Graph:
    """Return the graph with each body in its captured order on one stream, and a buffer for its memory.

    The body's temporary values lie in that buffer, which the task that runs the body writes.
    """
    bodies = []
    for body in graph.bodies:
        inner = close_gaps(rename_workspaces(schedule_bodies(body.graph, join)))
        inner, schedule = join(inner, serial(dependencies(inner)))
        bodies.append(Body(graph=inner, schedule=schedule, memory=layout(inner, schedule)))
    buffers, tasks = list(graph.buffers), []
    for task in graph.tasks:
        calls = []
        for call in calls_of(task.work):
            memory = bodies[call.body].memory
            nbytes = 0 if memory is None else memory.arena_nbytes
            calls.append(replace(call, scratch=len(buffers)))
            buffers.append(Buffer(kind=BufferKind.TEMPORARY, nbytes=nbytes, name="memory of a body"))
        tasks.append(_with_calls(task, calls, buffers))
    return replace(graph, buffers=tuple(buffers), tasks=tuple(tasks), bodies=tuple(bodies))


def _with_calls(task: Task, calls: Sequence[BodyCall], buffers: Sequence[Buffer]) -> Task:
    scratch = tuple(Access(buffer=c.scratch, offset=0, nbytes=buffers[c.scratch].nbytes) for c in calls)
    match task.work:
        case LoopWork():
            return replace(task, work=replace(task.work, call=calls[0]), writes=(*task.writes, *scratch))
        case SwitchWork():
            return replace(task, work=replace(task.work, calls=tuple(calls)), writes=(*task.writes, *scratch))
    return task


def _with_durations(graph: Graph, durations: Sequence[int]) -> Graph:
    return replace(graph, tasks=tuple(replace(t, duration_ns=d) for t, d in zip(graph.tasks, durations, strict=True)))


def _with_times(
    graph: Graph, tried: Sequence[_Tried], provenance: Provenance, timer: Timer | None, join: Join
) -> list[_Tried]:
    """Return the schedules with the times of their runs, estimated without a ``timer``.

    If the time of the first is noisy, the others are not measured: nothing can be compared with it.
    """
    if timer is None:
        return [replace(t, duration_ns=estimates.run_ns(graph, t.schedule, provenance.target)) for t in tried]
    timed: list[_Tried] = []
    for each in tried:
        ns, is_noisy = timer.duration(_timed(graph, each, provenance, join))
        timed.append(replace(each, duration_ns=ns, is_noisy=is_noisy))
        if timed[0].is_noisy:
            return [*timed, *tried[1:]]
    return timed


def _recomputing(
    graph: Graph, captured: _Tried, memory_limit: int, most: int, join: Join
) -> tuple[Graph, Dag, list[_Tried]]:
    """Return the graph with recomputed tasks, their order, and schedules within the limit; raises CompileError."""
    least, goal = _needed_nbytes(graph, captured, join), memory_limit
    for _ in range(_MOST_GOALS):
        smaller = recomputed(graph, goal)
        dag = dependencies(smaller)
        tried = [_try(f"recompute-{p}", smaller, s, join) for p, s in _schedules(smaller, dag, "auto", most)]
        if fitting := _fitting(smaller, tried, memory_limit, join):
            return smaller, dag, fitting
        found = min(_needed_nbytes(smaller, t, join) for t in tried)
        least, goal = min(least, found), int(goal * memory_limit / found * _CLOSER)  # the arena has holes
    raise CompileError(
        f"memory limit: {memory_limit} bytes are too few for the arena, the least found is {least}: allow more"
    )


def _timed(graph: Graph, tried: _Tried, provenance: Provenance, join: Join = _as_it_is) -> Plan:
    """Return a plan to time. Its launches have no accesses: only checks use these, and there may be many."""
    graph, schedule = join(graph, tried.schedule)
    tasks = (replace(t, reads=(), writes=()) if isinstance(t.work, KernelWork) else t for t in graph.tasks)
    graph = replace(graph, tasks=tuple(tasks))
    return assemble([Part(graph=graph, schedule=schedule, memory=tried.memory)], provenance)


def _with_faster_edges(graph: Graph, captured: _Tried, provenance: Provenance, timer: Timer) -> Graph:
    """Return the graph without its programmatic edges, if the captured order is faster without them.

    A kernel that starts early takes room on the multiprocessors from those before it.
    """
    if not programmatic_edges(graph):
        return graph
    plain = replace(graph, tasks=tuple(replace(t, programmatic_after=None) for t in graph.tasks))
    early, late = (timer.duration(_timed(g, captured, provenance)) for g in (graph, plain))
    return plain if late.ns < early.ns * (1 - timer.least_gain) and not early.is_noisy else graph


def _schedules(graph: Graph, dag: Dag, streams: str, most: int) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules to try for a policy, the captured order first."""
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


def _try(policy: str, graph: Graph, schedule: Schedule, join: Join = _as_it_is) -> _Tried:
    return _Tried(policy=policy, schedule=schedule, memory=layout(*join(graph, schedule)))


def _fewest_syncs(dag: Dag) -> int:
    """Return |E'| - |M|: edges of the minimum equivalent graph, less those of a maximum matching of it."""
    reduced = transitive_reduction(dag)
    matched = sum(after is not None for after in maximum_matching(reduced))
    return len(reduced.edges) - matched


def _fitting(graph: Graph, tried: Sequence[_Tried], memory_limit: int, join: Join) -> list[_Tried]:
    return [t for t in tried if _needed_nbytes(graph, t, join) <= memory_limit]


def _needed_nbytes(graph: Graph, tried: _Tried, join: Join) -> int:
    """Return the bytes of an arena for the results of all tasks, also of those within a joined task."""
    return (tried.memory if join is _as_it_is else layout(graph, tried.schedule)).arena_nbytes


def _choose(graph: Graph, tried: Sequence[_Tried], least_gain: float) -> _Tried:
    """Return the schedule of the least cost, which is its time multiplied by a power of a process's memory.

    Among those within ``least_gain`` of it, the captured order (the first) is preferred, then the one with the least
    memory. Other work only adds to a time, so one that is noisy and short is short; but nothing can be compared with a
    noisy first one.
    """
    first = tried[0]
    if first.is_noisy:
        return first
    kept = sum(b.nbytes for b in graph.buffers if b.kind in {BufferKind.CONSTANT, BufferKind.STATE})

    def cost(each: _Tried) -> float:
        return each.duration_ns * math.pow(_PROCESS_NBYTES + kept + each.memory.arena_nbytes, _POWER_OF_MEMORY)

    least = min(map(cost, tried))
    as_good = [t for t in tried if least >= cost(t) * (1 - least_gain)]
    return first if first in as_good else min(as_good, key=lambda t: t.memory.arena_nbytes)
