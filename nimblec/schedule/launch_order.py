"""The order in which tasks are issued, where streams and waits leave a choice."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median

from nimblec.base.ir import Graph, KernelWork, Schedule, Task
from nimblec.schedule.dag import scheduled_predecessors, successors_of


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
