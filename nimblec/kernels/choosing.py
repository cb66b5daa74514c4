"""Choose between calls by timing them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Timer = Callable[[Callable[[int], object]], float]
"""Microseconds of one call; the call takes the number of a copy of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest of some calls, by name, the one after it (None where there is one alone), and all times."""

    best: str
    runner_up: str | None
    microseconds: Mapping[str, float]


def choose(calls: Mapping[str, Callable[[int], object]], timer: Timer, *, margin: float = 0.02) -> Choice:
    """Time each call; the first one named stands unless another is faster by more than ``margin`` of its time."""
    times = {name: timer(call) for name, call in calls.items()}
    first = next(iter(times))
    ranked = sorted(times, key=times.__getitem__)
    if times[ranked[0]] > times[first] * (1 - margin):
        ranked.remove(first)
        ranked.insert(0, first)
    return Choice(best=ranked[0], runner_up=ranked[1] if len(ranked) > 1 else None, microseconds=times)
