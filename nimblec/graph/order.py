"""Numbers in an order that pairs of them demand."""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush


def ordered(after: Sequence[Collection[int]]) -> list[int]:
    """All numbers, each before those in ``after`` of it, else by size; those on or behind a circle are missing."""
    waiting = [0] * len(after)
    for numbers in after:
        for number in numbers:
            waiting[number] += 1
    ready = [number for number, count in enumerate(waiting) if not count]
    heapify(ready)
    found = []
    while ready:
        found.append(heappop(ready))
        for number in after[found[-1]]:
            waiting[number] -= 1
            if not waiting[number]:
                heappush(ready, number)
    return found
