"""Recipes of both targets: which are computed together, and the note on weights without one."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")

_SHOWN = 4
"""A note lists this many names."""


def groups(sources: Mapping[K, Iterable[Hashable]]) -> Iterator[list[K]]:
    """Constants in groups that share no weight; ``sources`` are the weights that each depends on."""
    group_of: dict[Hashable, int] = {}
    members: dict[int, list[K]] = {}
    for number, (constant, weights) in enumerate(sources.items()):
        own = tuple(weights)
        met = {group_of[weight] for weight in own if weight in group_of}
        first = min(met, default=number)
        members.setdefault(first, []).append(constant)
        for other in met - {first}:
            members[first] += members.pop(other)
        joined = (weight for member in members[first] for weight in sources[member]) if len(met) > 1 else own
        group_of |= dict.fromkeys(joined, first)
    yield from members.values()


def kept_note(kept: Collection[str]) -> str:
    """The note that some weights keep their values."""
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    names = ", ".join(map(repr, sorted(kept)[:_SHOWN])) + more
    return f"refittable: weights that keep their values, as no recipe was found for them: {names}"
