"""A topological order by Kahn's algorithm."""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush


def topological_order(successors: Sequence[Collection[int]]) -> list[int]:
    """Return all nodes, each before its ``successors``, the smallest first among several; none on or behind a cycle."""
    waiting = [0] * len(successors)
    for nodes in successors:
        for node in nodes:
            waiting[node] += 1
    ready = [node for node, count in enumerate(waiting) if not count]
    heapify(ready)
    found = []
    while ready:
        found.append(heappop(ready))
        for node in successors[found[-1]]:
            waiting[node] -= 1
            if not waiting[node]:
                heappush(ready, node)
    return found
