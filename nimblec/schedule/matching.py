"""Chains of tasks from bipartite matchings, and the antichain that proves them fewest.

Each task is a vertex on the left, as predecessor, and one on the right, as successor. A matching gives
each task at most one next task, and so divides the tasks into chains.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from nimblec.schedule.dag import Dag, descendants, members, task_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """A division of the tasks into the fewest chains.

    ``following[task]`` is the next task of its chain, None at its end. ``antichain`` are as many
    tasks as there are chains, none of which comes before another (Dilworth's theorem).
    """

    following: tuple[int | None, ...]
    antichain: tuple[int, ...]

    @property
    def chain_of(self) -> tuple[int, ...]:
        """The number of each task's chain; chains are numbered by their first task."""
        heads = set(range(len(self.following))) - set(self.following)
        chain = [0] * len(self.following)
        for number, head in enumerate(sorted(heads)):
            task: int | None = head
            while task is not None:
                chain[task] = number
                task = self.following[task]
        return tuple(chain)


Edge: TypeAlias = tuple[int, int]
"""(before, after)."""


def maximum_matching(reduced: Dag, preferred: Iterable[Edge] = ()) -> tuple[int | None, ...]:
    """Return the next task of each task: a maximum matching of the edges of ``reduced``.

    Nimble (NeurIPS 2020), Algorithm 1; by Hopcroft and Karp's algorithm. Edges in ``preferred`` are
    matched first, and dropped only if a matching with them would be smaller.
    """
    edges = reduced.edges
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for before, after in sorted(set(preferred) & set(edges)):
        if before not in chosen and after not in taken:
            chosen[before] = after
            taken.add(after)
    rest = [(before, after) for before, after in edges if before not in chosen and after not in taken]
    following = [chosen.get(task) for task in range(reduced.task_count)]
    for before, after in _hopcroft_karp(rest, reduced.task_count):
        following[before] = after
    if chosen:
        matching = _Matching([task_set(after) for after in reduced.successors], following)
        matching.grow(allowed=(1 << reduced.task_count) - 1)
        following = matching.following
    return tuple(following)


def _hopcroft_karp(edges: Sequence[Edge], task_count: int) -> Iterator[Edge]:
    """Yield the edges of a maximum matching of ``edges``."""
    if not edges:
        return
    before, after = np.array(edges, dtype=np.int32).T
    ones = np.ones(len(edges), dtype=np.int8)
    graph = csr_array((ones, (before, after)), shape=(task_count, task_count))
    matched = maximum_bipartite_matching(graph, perm_type="column")
    yield from ((task, int(successor)) for task, successor in enumerate(matched) if successor >= 0)


def fewest_chains(reduced: Dag, preferred: Iterable[Edge] = ()) -> Chains:
    """Return the fewest chains: those of `maximum_matching`, joined where one always follows another.

    Two tasks of a chain are always ordered already, so chains cost no concurrency. Joining keeps all
    matched edges if that suffices for the fewest chains, and drops some only if not.
    """
    matching = _Matching(descendants(reduced), maximum_matching(reduced, preferred))
    matching.grow(allowed=matching.unmatched)
    reached = matching.grow(allowed=(1 << reduced.task_count) - 1)
    return Chains(following=tuple(matching.following), antichain=matching.antichain(reached))


class _Matching:
    """A matching while it grows; ``after[task]`` are the tasks that may be matched to ``task``."""

    def __init__(self, after: Sequence[int], following: Sequence[int | None]) -> None:
        self.after = after
        self.following = list(following)
        self.preceding = {after: task for task, after in enumerate(following) if after is not None}
        self.unmatched = task_set(task for task in range(len(following)) if task not in self.preceding)

    def grow(self, *, allowed: int) -> int:
        """Add augmenting paths until there is none whose right side lies in ``allowed``.

        Return the right side that alternating paths from the unmatched left side reach. Tasks seen by
        a failed search can never be part of a later path (Kuhn's algorithm), so all failed searches
        together see each task once.
        """
        unseen = allowed
        for root in range(len(self.following)):
            if self.following[root] is None:
                seen = self._augment(root, unseen)
                unseen &= ~seen
        return allowed & ~unseen

    def antichain(self, reached: int) -> tuple[int, ...]:
        """Return the tasks left uncovered by Koenig's vertex cover of the closure, on both sides."""
        return tuple(
            task
            for task, successor in enumerate(self.following)
            if not reached >> task & 1 and (successor is None or reached >> successor & 1)
        )

    def _augment(self, root: int, unseen: int) -> int:
        """Search breadth first for an augmenting path from ``root``; return the tasks seen if there is none."""
        start = unseen
        parent: dict[int, int] = {}
        queue = [root]
        for left in queue:
            fresh = self.after[left] & unseen
            if free := fresh & self.unmatched:
                self._flip(left, next(members(free)), parent)
                return 0
            unseen &= ~fresh
            for right in members(fresh):
                parent[right] = left
                queue.append(self.preceding[right])
        return start & ~unseen

    def _flip(self, left: int, right: int, parent: dict[int, int]) -> None:
        """Match ``left`` to ``right`` and, along the path back to the root, all that lost their partner by it."""
        self.unmatched &= ~(1 << right)
        while True:
            lost = self.following[left]
            self.following[left] = right
            self.preceding[right] = left
            if lost is None:
                return
            left, right = parent[lost], lost
