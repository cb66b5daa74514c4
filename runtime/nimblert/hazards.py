"""The proof that a program is safe under concurrency: commands that conflict are ordered.

Two commands conflict if they touch a common byte of a region and one of them writes it. That covers
data handed from one to the other as well as arena bytes that serve one buffer after another. It
does not tell which of two ordered writes a later read means: that is the compiler's to prove
(`nimblec.schedule.memory.overlaps`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nimblert.edges import Edge, edges
from nimblert.plan import Access, Launch, Memcpy, Memset, Program, Record, Region, Wait, Work

_PAIRS = 1 << 20  # pairs of overlapping accesses looked at together: bounds the memory


@dataclass(frozen=True, slots=True)
class _Touches:
    """The accesses to one region, by ascending start; arrays of one shape."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    work: NDArray[np.int64]
    write: NDArray[np.bool_]


def hazards(program: Program) -> Iterator[str]:
    """Yield a sentence for each pair of commands, in each region, that conflict and nothing orders.

    And for each read of arena bytes that no earlier command, no input and not the command itself
    writes. The program must be verified otherwise: its indices and events in range.
    """
    works = [
        (place, command) for place, command in enumerate(program.commands) if not isinstance(command, Record | Wait)
    ]
    before = _before(edges(program.commands))
    for region, touches in _touches([work for _, work in works]).items():
        for first, second, start, end in _unordered(touches, before):
            yield (
                f"{_describe(program, works[first])} and {_describe(program, works[second])}: nothing orders "
                f"their accesses to {_name(*region)} bytes {start} to {end}"
            )
    yield from _unwritten(program, works)


def reads(work: Work) -> tuple[Access, ...]:
    """Return the byte ranges that a command reads."""
    match work:
        case Launch():
            return work.reads
        case Memcpy():
            return (Access(pointer=work.src, nbytes=work.nbytes),)
        case Memset():
            return ()


def writes(work: Work) -> tuple[Access, ...]:
    """Return the byte ranges that a command writes."""
    match work:
        case Launch():
            return work.writes
        case Memcpy():
            return (Access(pointer=work.dst, nbytes=work.nbytes),)
        case Memset():
            return (Access(pointer=work.dst, nbytes=work.count * work.element_nbytes),)


def _before(dependencies: Sequence[Sequence[Edge]]) -> NDArray[np.uint8]:
    """Return the packed bit matrix ``[work, source]``: the source has ended when the work starts."""
    matrix = np.zeros((len(dependencies), (len(dependencies) + 7) // 8), dtype=np.uint8)
    for work, row in enumerate(dependencies):
        for edge in row:
            matrix[work] |= matrix[edge.source]
            matrix[work, edge.source >> 3] |= 1 << (edge.source & 7)
    return matrix


def _touches(works: Sequence[Work]) -> dict[tuple[Region, int], _Touches]:
    """Return the accesses to each region, (region, index), that have any bytes."""
    rows: dict[tuple[Region, int], list[tuple[int, int, int, bool]]] = {}
    for index, work in enumerate(works):
        for accesses, write in ((reads(work), False), (writes(work), True)):
            for access in accesses:
                if access.nbytes:
                    start = access.pointer.offset
                    row = (start, start + access.nbytes, index, write)
                    rows.setdefault((access.pointer.region, access.pointer.index), []).append(row)
    result = {}
    for region in sorted(rows):
        start, end, work_index, write_flag = np.array(sorted(rows[region]), dtype=np.int64).T
        result[region] = _Touches(start, end, work_index, write_flag.astype(np.bool_))
    return result


def _unordered(touches: _Touches, before: NDArray[np.uint8]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first work, second work, start, end) for each unordered pair, with the bytes in common.

    Access ``i`` overlaps just those of the accesses after it that start before it ends. Of several
    overlaps of one pair of works the first is given.
    """
    count = len(touches.start)
    overlapping = np.searchsorted(touches.start, touches.end, side="left") - np.arange(count) - 1
    totals = np.cumsum(overlapping)
    found: set[tuple[int, int]] = set()
    low = 0
    while low < count:
        done = totals[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(totals, done + _PAIRS, side="right")))
        first = np.repeat(np.arange(low, high), overlapping[low:high])
        starts_of_runs = np.repeat(totals[low:high] - overlapping[low:high] - done, overlapping[low:high])
        second = first + 1 + np.arange(len(first)) - starts_of_runs
        early = np.minimum(touches.work[first], touches.work[second])
        late = np.maximum(touches.work[first], touches.work[second])
        ordered = before[late, early >> 3] >> (early & 7) & 1
        writing = touches.write[first] | touches.write[second]
        for pair in np.flatnonzero(writing & (ordered == 0) & (early != late)):
            works = (int(early[pair]), int(late[pair]))
            if works not in found:
                found.add(works)
                start = max(touches.start[first[pair]], touches.start[second[pair]])
                yield *works, int(start), int(min(touches.end[first[pair]], touches.end[second[pair]]))
        low = high


def _unwritten(program: Program, works: Sequence[tuple[int, Work]]) -> Iterator[str]:
    """Yield a sentence for each read of arena bytes that nothing has written by then.

    Bytes that the same command also writes are left out: it may fill them before it reads them.
    """
    written = _Ranges()
    for tensor in program.inputs:
        if tensor.pointer.region is Region.ARENA:
            written.add(tensor.pointer.offset, tensor.pointer.offset + tensor.span_nbytes)
    for place, work in works:
        for access in writes(work):
            if access.pointer.region is Region.ARENA:
                written.add(access.pointer.offset, access.pointer.offset + access.nbytes)
        for access in reads(work):
            start, end = access.pointer.offset, access.pointer.offset + access.nbytes
            if access.pointer.region is Region.ARENA and (gap := written.gap(start, end)):
                reader = _describe(program, (place, work))
                yield f"{reader}: reads arena bytes {gap[0]} to {gap[1]}, which nobody wrote"


class _Ranges:
    """A growing set of bytes, as sorted ranges that do not touch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect_left(self.ends, start)
        last = bisect_right(self.starts, end)
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]

    def gap(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first bytes of ``start`` to ``end`` that are not in the set, if any."""
        at = bisect_right(self.starts, start) - 1
        if at >= 0:
            start = max(start, self.ends[at])
        if start >= end:
            return None
        following = self.starts[at + 1] if at + 1 < len(self.starts) else end
        return start, min(end, following)


def _describe(program: Program, placed: tuple[int, Work]) -> str:
    place, work = placed
    op = program.ops[work.op]
    return f"commands[{place}] ({type(work).__name__.lower()} of {op.name} {op.source!r})"


def _name(region: Region, index: int) -> str:
    name = region.name.lower()
    return f"{name} {index}" if region in {Region.INPUT, Region.OUTPUT} else name
