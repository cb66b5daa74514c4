"""A topological order by Kahn's algorithm."""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush


def topological_order(successors: Sequence[Collection[int]], late: Collection[int] = ()) -> list[int]:
    """Return all nodes, each before its ``successors``; none on or behind a cycle.

    Of several that may come next the smallest does, those in ``late`` after all others.
    """
    waiting = [0] * len(successors)
    for nodes in successors:
        for node in nodes:
            waiting[node] += 1
    ready = [(node in late, node) for node, count in enumerate(waiting) if not count]
    heapify(ready)
    found = []
    while ready:
        found.append(heappop(ready)[1])
        for node in successors[found[-1]]:
            waiting[node] -= 1
            if not waiting[node]:
                heappush(ready, (node in late, node))
    return found
