"""Tilings as lists of integers, which ops take, and the most promising of many."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedTiling:
    """The division of a kernel's work into blocks, in fields that are integers."""

    @property
    def numbers(self) -> list[int]:
        """The fields in their order, as an op takes its ``tiling``."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The inverse of `numbers`."""
        return cls(**dict(zip((field.name for field in fields(cls)), numbers, strict=True)))


class _OfTwoAxes(Protocol):
    """A tiling of two axes."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def numbers(self) -> list[int]: ...


Cut = TypeVar("Cut", bound=_OfTwoAxes)


def most_promising(tilings: Iterable[Cut], estimate: Callable[[Cut], float], *, limit: int, alike: int) -> list[Cut]:
    """The ``limit`` fastest by an estimate, at most ``alike`` of each block_m and block_n."""
    chosen: list[Cut] = []
    seen: Counter[tuple[int, int]] = Counter()
    for tiling in sorted(tilings, key=lambda tiling: (estimate(tiling), tiling.numbers)):
        cut = tiling.block_m, tiling.block_n
        if seen[cut] < alike:
            seen[cut] += 1
            chosen.append(tiling)
    return chosen[:limit]
