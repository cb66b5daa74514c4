"""Tilings as lists of integers, which ops take, and the most promising of many."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self, TypeVar

from nimblec.kernels.gpu import GPU
from nimblec.kernels.shapes import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedTiling:
    """The division of a kernel's work into blocks, in fields that are integers.

    Tilings of kernels that compute otherwise have a ``name_prefix``.
    """

    name_prefix: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """A text that tells a request's candidates apart."""
        return self.name_prefix + "x".join(map(str, self.numbers))

    @property
    def numbers(self) -> list[int]:
        """The fields in their order, as an op takes its ``tiling``."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """Return the inverse of `numbers`."""
        return cls(**dict(zip((field.name for field in fields(cls)), numbers, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelTiling(NumberedTiling):
    """A block computes ``block_m`` pixels of ``block_c`` channels."""

    block_m: int
    block_c: int
    num_warps: int = 4

    def blocks_over(self, pixels: int, channels: int) -> int:
        """Return how many blocks images take."""
        return ceil_div(pixels, self.block_m) * ceil_div(channels, self.block_c)


OfPixels = TypeVar("OfPixels", bound=PixelTiling)


def by_load(tilings: Iterable[OfPixels], pixels: int, channels: int, gpu: GPU) -> list[OfPixels]:
    """Sort tilings: first those with about two blocks per multiprocessor and little edge waste."""

    def cost(tiling: OfPixels) -> tuple[float, list[int]]:
        blocks = tiling.blocks_over(pixels, channels)
        done = blocks * tiling.block_m * tiling.block_c / (pixels * channels)
        load = blocks / (2 * gpu.multiprocessors)
        return done * max(load**0.5, load**-0.5), tiling.numbers

    return sorted(tilings, key=cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoAxisTiling(NumberedTiling):
    """A block takes ``block_m`` by ``block_n`` of the two axes of a product."""

    block_m: int
    block_n: int


Cut = TypeVar("Cut", bound=TwoAxisTiling)


def most_promising(tilings: Iterable[Cut], estimate: Callable[[Cut], float], *, limit: int, alike: int) -> list[Cut]:
    """Return the ``limit`` fastest by an estimate, at most ``alike`` of each block_m and block_n."""
    chosen: list[Cut] = []
    seen: Counter[tuple[int, int]] = Counter()
    for tiling in sorted(tilings, key=lambda tiling: (estimate(tiling), tiling.numbers)):
        cut = tiling.block_m, tiling.block_n
        if seen[cut] < alike:
            seen[cut] += 1
            chosen.append(tiling)
    return chosen[:limit]
