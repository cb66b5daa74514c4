"""Orders of the nodes of directed graphs: a topological one by Kahn's algorithm, and their components."""

from collections.abc import Collection, Iterable, Iterator, Sequence
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


def components(successors: Sequence[Collection[int]]) -> list[list[int]]:
    """Return the strongly connected components, by Kosaraju's algorithm: nodes that reach one another, ascending."""
    predecessors: list[list[int]] = [[] for _ in successors]
    for node, following in enumerate(successors):
        for successor in following:
            predecessors[successor].append(node)
    finished = [node for tree in _trees(range(len(successors)), successors) for node in tree]
    return [sorted(tree) for tree in _trees(reversed(finished), predecessors)]


def _trees(roots: Iterable[int], successors: Sequence[Collection[int]]) -> Iterator[list[int]]:
    """Yield the nodes that a depth-first search finds from each of the roots, each behind those found from it."""
    left = set(range(len(successors)))
    for root in roots:
        tree, waiting = [], [(root, False)]
        while waiting:
            node, is_finished = waiting.pop()
            if is_finished:
                tree.append(node)
            elif node in left:
                left.remove(node)
                waiting.append((node, True))
                waiting += [(successor, False) for successor in successors[node]]
        if tree:
            yield tree
