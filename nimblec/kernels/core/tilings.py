"""The most promising of many tilings."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class HasNumbers(Protocol):
    """A tiling."""

    @property
    def numbers(self) -> list[int]:
        """What an op takes as its tiling."""


class _Blocks(HasNumbers, Protocol):
    """A tiling of two axes."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...


Cut = TypeVar("Cut", bound=_Blocks)


def most_promising(tilings: Iterable[Cut], estimate: Callable[[Cut], float], *, limit: int, alike: int) -> list[Cut]:
    """The ``limit`` quickest by an estimate, no more than ``alike`` of the same block_m and block_n."""
    chosen: list[Cut] = []
    seen: Counter[tuple[int, int]] = Counter()
    for tiling in sorted(tilings, key=lambda tiling: (estimate(tiling), tiling.numbers)):
        cut = tiling.block_m, tiling.block_n
        if seen[cut] < alike:
            seen[cut] += 1
            chosen.append(tiling)
    return chosen[:limit]
