"""Directed acyclic graphs of tasks, and the order that they imply.

A set of tasks is a Python integer, bit ``t`` standing for task ``t``: union and intersection of ten
thousand tasks take less than a microsecond.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nimblec.base.ir import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """``predecessors[task]``: the tasks, all of lower index, that ``task`` must come after.

    In ascending order, each once. So the order of the indices is a valid serial order.
    """

    predecessors: tuple[tuple[int, ...], ...]

    @property
    def task_count(self) -> int:
        """The number of tasks."""
        return len(self.predecessors)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Every (before, after), ordered by ``after``."""
        return tuple((before, after) for after, befores in enumerate(self.predecessors) for before in befores)

    @property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The tasks that directly come after each task, in ascending order."""
        return successors_of(self.predecessors)


def successors_of(predecessors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the tasks that directly come after each task, in ascending order, from those that come before."""
    successors: list[list[int]] = [[] for _ in predecessors]
    for task, before in enumerate(predecessors):
        for predecessor in before:
            successors[predecessor].append(task)
    return tuple(map(tuple, successors))


def members(tasks: int) -> Iterator[int]:
    """Yield the indices of the bits that are set, in ascending order."""
    while tasks:
        lowest = tasks & -tasks
        yield lowest.bit_length() - 1
        tasks ^= lowest


def task_set(tasks: Iterable[int]) -> int:
    """Return the set of ``tasks``."""
    result = 0
    for task in tasks:
        result |= 1 << task
    return result


def ancestors(dag: Dag) -> tuple[int, ...]:
    """Return, for each task, the set of tasks that come before it, directly or not."""
    return _closure(range(dag.task_count), dag.predecessors)


def descendants(dag: Dag) -> tuple[int, ...]:
    """Return, for each task, the set of tasks that come after it, directly or not."""
    return _closure(reversed(range(dag.task_count)), dag.successors)


def scheduled_ancestors(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each task, the set of tasks that end before it starts under ``schedule``.

    That is happens-before: the order of each stream and the waits, not the order of issue.
    """
    return _closure(schedule.order, scheduled_predecessors(schedule))


def scheduled_descendants(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each task, the set of tasks that start after it has ended under ``schedule``."""
    return _closure(reversed(schedule.order), successors_of(scheduled_predecessors(schedule)))


def scheduled_predecessors(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return what each task directly follows: the task before it on its stream, and its waits."""
    lists: list[list[int]] = [[] for _ in schedule.order]
    last: dict[int, int] = {}
    for task in schedule.order:
        stream = schedule.streams[task]
        if stream in last:
            lists[task].append(last[stream])
        last[stream] = task
    for before, after in schedule.waits:
        lists[after].append(before)
    return tuple(map(tuple, lists))


def transitive_reduction(dag: Dag) -> Dag:
    """Return the smallest graph with the same paths: the paper's minimum equivalent graph.

    Time: one union of bit sets for each edge.
    """
    before: list[int] = []
    reduced: list[tuple[int, ...]] = []
    for predecessors in dag.predecessors:
        implied = 0
        kept = []
        for task in reversed(predecessors):  # what implies an edge has a higher index than its source
            if not implied >> task & 1:
                kept.append(task)
                implied |= before[task] | 1 << task
        before.append(implied)
        reduced.append(tuple(reversed(kept)))
    return Dag(predecessors=tuple(reduced))


def _closure(order: Iterable[int], neighbours: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the set reached from each task; ``order`` lists neighbours before the task itself."""
    reached = [0] * len(neighbours)
    for task in order:
        found = 0
        for neighbour in neighbours[task]:
            found |= reached[neighbour] | 1 << neighbour
        reached[task] = found
    return tuple(reached)
