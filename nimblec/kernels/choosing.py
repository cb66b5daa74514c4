"""Choose between calls by timing them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

Timer = Callable[[Callable[[int], object]], float]
"""The microseconds of one call; the call takes the number of the copy of its weights."""


class Times(Protocol):
    """Measured nanoseconds by key, as `nimblec.plan.timing_cache.TimingCache` keeps them between compilations."""

    def __contains__(self, key: str) -> bool:
        """Return whether a time is known."""

    def __getitem__(self, key: str) -> int:
        """Return the time."""

    def __setitem__(self, key: str, duration_ns: int) -> None:
        """Note a time."""


FINALISTS = 3
"""How many calls besides the first are timed thoroughly."""
_MARGIN = 0.02
"""The part of the first call's time that another must save to be the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest of some calls, by name, and their times; calls that the screening found slow have none."""

    best: str
    microseconds: Mapping[str, float]


def choose(calls: Mapping[str, Callable[[int], object]], timer: Timer, *, screen: Timer | None = None) -> Choice:
    """Time all calls, or with ``screen``, a shorter timer, the first one and those that are fastest by it."""
    first, *others = calls
    if screen is not None and len(others) > FINALISTS:
        rough = {name: screen(calls[name]) for name in others}
        others = sorted(rough, key=rough.__getitem__)[:FINALISTS]
    return rank({name: timer(calls[name]) for name in (first, *others)})


def rank(times: Mapping[str, float]) -> Choice:
    """Rank calls by time; the first one named stays the best unless another is faster by more than 2 %."""
    first, best = next(iter(times)), min(times, key=times.__getitem__)
    return Choice(best=first if times[best] > times[first] * (1 - _MARGIN) else best, microseconds=times)


def key_of(what: object) -> str:
    """Return the key of a time, a hash of the ``repr`` of everything that the time depends on."""
    return sha256(repr(what).encode()).hexdigest()
