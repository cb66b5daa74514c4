"""Choose between calls by timing them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Timer = Callable[[Callable[[int], object]], float]
"""Microseconds of one call; the call takes the number of a copy of its weights."""

FINALISTS = 3
"""How many calls beside the first are timed well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest of some calls, by name, the one after it (None where there is one alone), and their times.

    Calls that a first, short look found slow have no time.
    """

    best: str
    runner_up: str | None
    microseconds: Mapping[str, float]


def choose(
    calls: Mapping[str, Callable[[int], object]], timer: Timer, *, screen: Timer | None = None, margin: float = 0.02
) -> Choice:
    """Time the first call and the others, or with ``screen``, a shorter timer, those that look fastest to it."""
    first, *others = calls
    if screen is not None and len(others) > FINALISTS:
        rough = {name: screen(calls[name]) for name in others}
        others = sorted(rough, key=rough.__getitem__)[:FINALISTS]
    return rank({name: timer(calls[name]) for name in (first, *others)}, margin=margin)


def rank(times: Mapping[str, float], *, margin: float = 0.02) -> Choice:
    """The first one named stands unless another is faster by more than ``margin`` of its time."""
    first = next(iter(times))
    ranked = sorted(times, key=times.__getitem__)
    if times[ranked[0]] > times[first] * (1 - margin):
        ranked.remove(first)
        ranked.insert(0, first)
    return Choice(best=ranked[0], runner_up=ranked[1] if len(ranked) > 1 else None, microseconds=times)
