"""Policies that choose a stream for every task, and the waits between streams.

Each takes the dependencies of a graph and returns a valid schedule.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from statistics import median

from nimblec.base.ir import Graph, KernelWork, Schedule, Task
from nimblec.schedule.dag import Dag, scheduled_predecessors, successors_of, transitive_reduction
from nimblec.schedule.matching import fewest_chains


def serial(dag: Dag) -> Schedule:
    """Return the captured order on one stream."""
    count = dag.task_count
    return Schedule(order=tuple(range(count)), streams=(0,) * count, stream_count=min(count, 1), waits=())


def maximal(dag: Dag, preferred: Iterable[tuple[int, int]] = ()) -> Schedule:
    """Return the schedule that keeps all concurrency, on the fewest streams.

    Nimble (NeurIPS 2020), Algorithm 1: chains from a maximum matching of the minimum equivalent graph E', and a wait
    for each edge of E' between chains. Chains that always follow one another share a stream. Among equal choices,
    ``preferred`` edges (before, after), the programmatic ones, lie within a stream.
    """
    reduced = transitive_reduction(dag)
    return arrange(reduced, range(dag.task_count), fewest_chains(reduced, preferred).chain_of)


def certificate(dag: Dag) -> tuple[int, ...]:
    """Return as many tasks as `maximal` uses streams, any two of which may run at the same time.

    By Dilworth's theorem they prove that fewer streams would cost concurrency.
    """
    return fewest_chains(transitive_reduction(dag)).antichain


def limited(dag: Dag, n: int, durations: Sequence[int]) -> Schedule:
    """Return a schedule on at most ``n`` streams, in the captured order of issue.

    `maximal` if that needs no more; else each task in turn goes to the stream where it can start first.
    ``durations`` are in ns, by task.
    """
    widest = maximal(dag)
    if widest.stream_count <= n:
        return widest
    board = _Board(dag, n, durations, edge_cost=0)
    for task in range(dag.task_count):
        board.put(task)
    return arrange(dag, range(dag.task_count), board.streams)


def critical_path(dag: Dag, durations: Sequence[int], edge_cost: int, n: int) -> Schedule:
    """Return a list schedule on at most ``n`` streams that runs the longest remaining path first.

    The upward rank of HEFT (Topcuoglu et al., 2002): of the tasks that are ready, the one with the
    most ns of work on a path from it goes next, to the stream where it can start first, an edge
    between streams costing ``edge_cost`` ns. Tasks are issued in the order in which they start.
    """
    rank = _upward_rank(dag, durations)
    successors = dag.successors
    missing = [len(before) for before in dag.predecessors]
    board = _Board(dag, n, durations, edge_cost)
    coming = [(0, task) for task, count in enumerate(missing) if count == 0]  # (ready at, task)
    ready: list[tuple[int, int]] = []  # (-rank, task)
    while coming or ready:
        now = min(board.free) if ready else max(min(board.free), coming[0][0])
        while coming and coming[0][0] <= now:
            _, task = heapq.heappop(coming)
            heapq.heappush(ready, (-rank[task], task))
        _, task = heapq.heappop(ready)
        board.put(task)
        for successor in successors[task]:
            missing[successor] -= 1
            if missing[successor] == 0:
                at = max(board.end[before] for before in dag.predecessors[successor])
                heapq.heappush(coming, (at, successor))
    order = sorted(range(dag.task_count), key=lambda task: (board.start[task], -rank[task], task))
    return arrange(dag, order, board.streams)


def arrange(dag: Dag, order: Iterable[int], streams: Sequence[int]) -> Schedule:
    """Return the schedule with this order of issue, these streams and the fewest waits.

    ``order`` must respect ``dag``; ``streams[task]`` may be any numbers, and are renumbered from 0
    in order of issue. A wait is left out where the streams and the other waits imply it.
    """
    order = tuple(order)
    names: dict[int, int] = {}
    for task in order:
        names.setdefault(streams[task], len(names))
    renamed = tuple(names[stream] for stream in streams)
    return Schedule(order=order, streams=renamed, stream_count=len(names), waits=_waits(dag, order, renamed))


def _waits(dag: Dag, order: Sequence[int], streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the edges between streams in the reduction of ``dag`` together with the streams' order."""
    position = {task: place for place, task in enumerate(order)}
    last: dict[int, int] = {}
    predecessors = []
    for place, task in enumerate(order):
        before = {position[predecessor] for predecessor in dag.predecessors[task]}
        if streams[task] in last:
            before.add(last[streams[task]])
        last[streams[task]] = place
        predecessors.append(tuple(sorted(before)))
    reduced = transitive_reduction(Dag(predecessors=tuple(predecessors)))
    pairs = ((order[before], order[after]) for before, after in reduced.edges)
    return tuple((before, after) for before, after in pairs if streams[before] != streams[after])


class _Board:
    """A list schedule under construction: the stream, start and end of each task."""

    def __init__(self, dag: Dag, n: int, durations: Sequence[int], edge_cost: int) -> None:
        self.predecessors = dag.predecessors
        self.durations = durations
        self.edge_cost = edge_cost
        self.free = [0] * n
        self.streams = [-1] * dag.task_count
        self.start = [0] * dag.task_count
        self.end = [0] * dag.task_count

    def put(self, task: int) -> None:
        """Append ``task`` to the stream where it can start first; of several, to the one with the smallest gap."""
        ends = {before: self.end[before] for before in self.predecessors[task]}

        def start_on(stream: int) -> int:
            costs = (end if self.streams[before] == stream else end + self.edge_cost for before, end in ends.items())
            return max(self.free[stream], *costs, 0)

        stream = min(range(len(self.free)), key=lambda s: (start_on(s), -self.free[s]))
        self.streams[task] = stream
        self.start[task] = start_on(stream)
        self.end[task] = self.free[stream] = self.start[task] + max(1, self.durations[task])


def _upward_rank(dag: Dag, durations: Sequence[int]) -> list[int]:
    """Return the length, in ns, of the longest path from the start of each task."""
    rank = [0] * dag.task_count
    for task in reversed(range(dag.task_count)):
        rank[task] += max(1, durations[task])
        for before in dag.predecessors[task]:
            rank[before] = max(rank[before], rank[task])
    return rank


def interleaved(graph: Graph, schedule: Schedule) -> Schedule:
    """Return ``schedule`` issued so that memory-bound and compute-bound tasks alternate.

    Opara (Chen et al., 2023): of the tasks that may be issued next, the one with the fewest threads
    of the kind that was not issued last, so that kernels that run side by side need different
    resources. Streams and waits stay. A task counts as memory-bound if it touches at least as many
    bytes per ns as the median task.
    """
    rates = [_nbytes(task) / max(1, task.duration_ns) for task in graph.tasks]
    middle = median(rates) if rates else 0.0
    memory_bound = [rate >= middle for rate in rates]
    order = _alternating(scheduled_predecessors(schedule), memory_bound, [_threads(t) for t in graph.tasks])
    return replace(schedule, order=order)


def _alternating(
    predecessors: Sequence[Sequence[int]], kinds: Sequence[bool], demands: Sequence[int]
) -> tuple[int, ...]:
    """Return a topological order that alternates between the kinds and takes the smallest demand of each first."""
    missing = [len(before) for before in predecessors]
    successors = successors_of(predecessors)
    ready: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for task, count in enumerate(missing):
        if count == 0:
            heapq.heappush(ready[kinds[task]], (demands[task], task))
    order: list[int] = []
    kind = False
    while ready[False] or ready[True]:
        _, task = heapq.heappop(ready[kind] or ready[not kind])
        kind = not kinds[task]
        order.append(task)
        for successor in successors[task]:
            missing[successor] -= 1
            if missing[successor] == 0:
                heapq.heappush(ready[kinds[successor]], (demands[successor], successor))
    return tuple(order)


def _nbytes(task: Task) -> int:
    return sum(access.nbytes for access in (*task.reads, *task.writes))


def _threads(task: Task) -> int:
    return prod(task.work.grid) * prod(task.work.block) if isinstance(task.work, KernelWork) else 0
