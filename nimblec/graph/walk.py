"""Reachability in a graph of any kind."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: T, following: Callable[[T], Iterable[T]]) -> set[T]:
    """All that can be reached from ``start`` by ``following``, itself included."""
    found = {start}
    waiting = [start]
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found
