"""The accesses of a program, cut into pieces: ranges of bytes within which no access begins or ends.

An access covers all bytes of a piece or none. So it is enough to look at the accesses to each piece in issue order: if
each is ordered after the write before it, and each read before the write after it, then all conflicting pairs are
ordered. That is linear in the accesses to pieces, where comparing all pairs is quadratic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nimblert.plan import Access, Crop, Launch, Memcpy, Memset, Region, Switch, While, Work

_TOGETHER = 1 << 20  # accesses to pieces that are processed at once: bounds the memory

SIZE_NBYTES = 8
"""Of each of the sizes that a Crop reads."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Touches:
    """The accesses to one region by issue order; arrays of one shape. ``work`` counts work commands."""

    start: Ints
    end: Ints
    work: Ints
    write: Bools


_NO_NUMBERS = np.empty(0, np.int64)
NOTHING = Touches(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, np.empty(0, np.bool_))
"""No accesses."""


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Pairs of works that conflict in a piece, from ``start`` to ``end``; ``early`` was issued before ``late``.

    ``late_writes``: whether ``late`` writes the piece.
    """

    early: Ints
    late: Ints
    late_writes: Bools
    start: Ints
    end: Ints


def reads(work: Work) -> tuple[Access, ...]:
    """Return the byte ranges that a command reads."""
    match work:
        case Launch() | While() | Switch():
            return work.reads
        case Memcpy():
            return (Access(pointer=work.src, nbytes=work.nbytes),)
        case Memset():
            return ()
        case Crop():
            return (Access(pointer=work.sizes, nbytes=SIZE_NBYTES * work.rank),)


def writes(work: Work) -> tuple[Access, ...]:
    """Return the byte ranges that a command writes."""
    match work:
        case Launch() | While() | Switch():
            return work.writes
        case Memcpy():
            return (Access(pointer=work.dst, nbytes=work.nbytes),)
        case Memset():
            return (Access(pointer=work.dst, nbytes=work.count * work.element_nbytes),)
        case Crop():
            return ()


def bodies_of(work: Work) -> tuple[int, ...]:
    """Return the bodies that a command may run, as indices of `Plan.bodies`."""
    match work:
        case While():
            return (work.body,)
        case Switch():
            return work.bodies
    return ()


def touches(
    works: Sequence[Work], written: Callable[[Work], Iterable[Access]] = writes
) -> dict[tuple[Region, int], Touches]:
    """Return the accesses to each region, (region, index), that have any bytes; ``written`` tells a work's writes."""
    rows: dict[tuple[Region, int], list[tuple[int, int, int, bool]]] = {}
    for index, work in enumerate(works):
        for write, accesses in ((False, reads(work)), (True, written(work))):
            for access in accesses:
                if access.nbytes:
                    pointer = access.pointer
                    row = (pointer.offset, pointer.offset + access.nbytes, index, write)
                    rows.setdefault((pointer.region, pointer.index), []).append(row)
    result = {}
    for region in sorted(rows):
        start, end, work_index, write_flag = np.array(rows[region], dtype=np.int64).T
        result[region] = Touches(start, end, work_index, write_flag.astype(np.bool_))
    return result


def cuts(touched: Touches) -> Ints:
    """Return the offsets at which accesses begin or end, ascending; a piece lies between each two."""
    return np.unique(np.concatenate((touched.start, touched.end)))


def count(touched: Touches) -> int:
    """Return the number of pieces of all accesses together."""
    borders = cuts(touched)
    first, last = (np.searchsorted(borders, ends) for ends in (touched.start, touched.end))
    return int((last - first).sum())


def conflicts(touched: Touches) -> Iterator[Conflicts]:
    """Yield the pairs whose order implies all others: each write with the next access, each read with the next write.

    They come for some pieces at a time, in ascending order of pieces.
    """
    borders = cuts(touched)
    first, last = (np.searchsorted(borders, ends) for ends in (touched.start, touched.end))
    by_piece = np.cumsum(np.bincount(first, minlength=len(borders)) - np.bincount(last, minlength=len(borders)))
    totals = np.cumsum(by_piece)
    low = 0
    while low < len(borders) - 1:
        done = totals[low - 1] if low else 0
        high = min(len(borders) - 1, max(low + 1, int(np.searchsorted(totals, done + _TOGETHER, side="right"))))
        within = np.flatnonzero((first < high) & (last > low))
        starts, ends = np.maximum(first[within], low), np.minimum(last[within], high)
        yield _neighbours(touched, within, starts, ends - starts, borders)
        low = high


def _neighbours(touched: Touches, within: Ints, starts: Ints, counts: Ints, borders: Ints) -> Conflicts:
    """Return the pairs among the accesses ``within``, each of which has ``counts`` pieces from ``starts``."""
    access = np.repeat(within, counts)
    piece = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(len(access))
    work, write = touched.work[access], touched.write[access]
    by_time = np.argsort((piece * (int(touched.work.max()) + 1) + work) * 2 + write, kind="stable")
    piece, work, write = piece[by_time], work[by_time], write[by_time]
    # Of the accesses of one work to a piece the last is kept, a write if there is one.
    kept = np.append((np.diff(piece) != 0) | (np.diff(work) != 0), True)
    piece, work, write = piece[kept], work[kept], write[kept]
    place = np.arange(len(piece))
    begin = np.searchsorted(piece, piece, side="left")
    end = np.searchsorted(piece, piece, side="right")
    write_before = np.append(-1, np.maximum.accumulate(np.where(write, place, -1))[:-1])
    write_after = np.append(np.minimum.accumulate(np.where(write, place, len(place))[::-1])[::-1][1:], len(place))
    after_write = np.flatnonzero(write_before >= begin)
    before_write = np.flatnonzero(~write & (write_after < end))
    early = np.concatenate((write_before[after_write], before_write))
    late = np.concatenate((after_write, write_after[before_write]))
    return Conflicts(work[early], work[late], write[late], borders[piece[early]], borders[piece[early] + 1])
