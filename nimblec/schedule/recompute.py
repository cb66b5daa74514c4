"""Rematerialisation: results that are needed again much later are computed again instead of kept.

After T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), on tasks instead of layers, chosen greedily
by the bytes and the time that a result is kept, over the cost of computing it again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from nimblec.base.ir import BufferKind, Graph, Task
from nimblec.schedule.dependencies import renamed
from nimblec.schedule.lifetimes import ARENA_KINDS, task_buffers

_MOST_TASKS = 16
"""Tasks that may run again for one buffer."""
_LITTLE = 16
"""A source that is this many times smaller than its result is kept for the recomputation."""
_MOST_TRIED = 32
"""Candidates tried without success before the search ends."""


def recomputed(graph: Graph, limit_nbytes: int) -> Graph:
    """Return a graph with the same results that keeps fewer bytes of the arena beyond the limit, in its captured order.

    Some tasks occur in it several times, each time with memory of their own: tasks whose sources still exist or are
    recomputed too, and that write nothing that outlives the run. The limit may not be reached.
    """
    known: _Known = {}
    found = _Analysis(graph, known)
    while excess := found.excess(limit_nbytes):
        better = (
            tried
            for again in found.candidates(limit_nbytes)
            if (tried := _Analysis(_inserted(found.graph, again), known)).excess(limit_nbytes) < excess
        )
        best = next(better, None)
        if best is None:
            break
        found = best
    return found.graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """``buffer`` is not kept, but computed again before task ``at`` by the tasks ``run``.

    These write into new buffers; the pairs (task, buffer) in ``there`` are sources that they read where they are.
    """

    buffer: int
    at: int
    run: tuple[int, ...]
    there: frozenset[tuple[int, int]]


_Known: TypeAlias = dict[int, tuple[Task, frozenset[int], frozenset[int]]]
"""By the id of a task: the task, which keeps the id its own, and the buffers that it uses and writes."""


class _Analysis:
    """The uses of each buffer of a graph in the captured order, and the bytes kept at each task.

    ``known`` caches the buffers of tasks that several graphs share.
    """

    def __init__(self, graph: Graph, known: _Known) -> None:
        self.graph = graph
        self._known = known
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        for index, task in enumerate(graph.tasks):
            _, used, written = self._known_of(task)
            for buffer in used:
                self._uses[buffer].append(index)
            for buffer in written:
                self._writes[buffer].append(index)
        for view in graph.inputs:
            self._uses[view.buffer].insert(0, 0)
        for view in graph.outputs:
            self._uses[view.buffer].append(len(graph.tasks) - 1)
        self._fixed = {view.buffer for view in (*graph.inputs, *graph.outputs)}
        steps = np.zeros(len(graph.tasks) + 1, np.int64)
        for buffer, uses in self._uses.items():
            if graph.buffers[buffer].kind in ARENA_KINDS:
                steps[min(uses)] += self._room(buffer)
                steps[max(uses) + 1] -= self._room(buffer)
        self.live = steps.cumsum()[:-1]
        """Bytes of the arena at each task, alignment included."""

    def _room(self, buffer: int) -> int:
        record = self.graph.buffers[buffer]
        return -(-record.nbytes // record.alignment) * record.alignment

    def _known_of(self, task: Task) -> tuple[Task, frozenset[int], frozenset[int]]:
        found = self._known.get(id(task))
        if found is None:
            found = self._known[id(task)] = task, task_buffers(task), frozenset(w.buffer for w in task.writes)
        return found

    def excess(self, limit_nbytes: int) -> int:
        """Return the bytes beyond the limit, summed over the tasks."""
        return int(np.maximum(self.live - limit_nbytes, 0).sum())

    def candidates(self, limit_nbytes: int) -> Iterator[_Again]:
        """Yield recomputations of buffers that are kept, unused, beyond the limit, the most worthwhile first."""
        crowded = np.concatenate(([0], (self.live > limit_nbytes).cumsum()))
        worth: list[tuple[float, _Again]] = []
        for buffer, before, at in self._gaps():
            tasks = int(crowded[at] - crowded[before + 1])
            again = self._again(buffer, at) if tasks else None
            if again is not None:
                cost = sum(self.graph.tasks[task].duration_ns + 1 for task in again.run)
                worth.append((self._room(buffer) * tasks / cost, again))
        worth.sort(key=lambda pair: -pair[0])
        return (again for _, again in worth[:_MOST_TRIED])

    def _gaps(self) -> Iterator[tuple[int, int, int]]:
        """Yield (buffer, before, at) for each pair of successive uses between which a buffer is only kept."""
        for buffer, uses in self._uses.items():
            if self.graph.buffers[buffer].kind is not BufferKind.TEMPORARY or buffer in self._fixed:
                continue
            last = max(self._writes[buffer], default=len(self.graph.tasks))
            for before, at in pairwise(uses):
                if last <= before and before + 1 < at:
                    yield buffer, before, at

    def _again(self, buffer: int, at: int) -> _Again | None:
        """Return the recomputation of a buffer before task ``at``; None if there is none."""
        run: set[int] = set()
        there: set[tuple[int, int]] = set()
        waiting = list(self._writes[buffer])
        while waiting:
            index = waiting.pop()
            if index in run:
                continue
            run.add(index)
            if len(run) > _MOST_TASKS or not self._is_repeatable(self.graph.tasks[index]):
                return None
            task = self.graph.tasks[index]
            _, used, written = self._known_of(task)
            for source in (used - written) | {access.buffer for access in task.reads}:
                if source not in written and self._is_there(source, index, at, self.graph.buffers[buffer].nbytes):
                    there.add((index, source))
                elif self.graph.buffers[source].kind not in ARENA_KINDS or source in self._fixed:
                    return None
                else:
                    waiting += [writer for writer in self._writes[source] if writer < index]
        return _Again(buffer=buffer, at=at, run=tuple(sorted(run)), there=frozenset(there))

    def _is_repeatable(self, task: Task) -> bool:
        """Return whether a task is known to write into the arena alone."""
        if self.graph.ops[task.op].opaque:
            return False
        return all(self.graph.buffers[access.buffer].kind in ARENA_KINDS for access in task.writes)

    def _is_there(self, buffer: int, index: int, at: int, nbytes: int) -> bool:
        """Return whether task ``at`` finds in a buffer what task ``index`` found: it is kept, or small enough."""
        if any(index < writer < at for writer in self._writes[buffer]):
            return False
        record = self.graph.buffers[buffer]
        is_kept = record.kind not in ARENA_KINDS or self._uses[buffer][-1] >= at
        return is_kept or record.nbytes * _LITTLE <= nbytes


def _inserted(graph: Graph, again: _Again) -> Graph:
    """Return the graph with the tasks of a recomputation inserted."""
    buffers = list(graph.buffers)
    made: dict[int, int] = {}
    for index in again.run:
        task = graph.tasks[index]
        scratch = (b for b in sorted(task_buffers(task)) if graph.buffers[b].kind is BufferKind.WORKSPACE)
        for buffer in (*(access.buffer for access in task.writes), *scratch):
            if buffer not in made:
                made[buffer] = len(buffers)
                buffers.append(graph.buffers[buffer])
    clones = [
        _on_others(graph.tasks[index], {b: n for b, n in made.items() if (index, b) not in again.there}, None)
        for index in again.run
    ]
    only = {again.buffer: made[again.buffer]}
    later = [_on_others(task, only, _moved(task, again.at, len(clones))) for task in graph.tasks[again.at :]]
    return replace(graph, buffers=tuple(buffers), tasks=(*graph.tasks[: again.at], *clones, *later))


def _moved(task: Task, at: int, count: int) -> int | None:
    """Return the source of a task's programmatic edge, after ``count`` tasks were inserted before task ``at``."""
    before = task.programmatic_after
    return before if before is None or before < at else before + count


def _on_others(task: Task, names: Mapping[int, int], programmatic_after: int | None) -> Task:
    """Return a task on other buffers."""
    if task.programmatic_after == programmatic_after and task_buffers(task).isdisjoint(names):
        return task
    return replace(renamed(task, lambda buffer: names.get(buffer, buffer)), programmatic_after=programmatic_after)
