"""The proof that a program is safe under concurrency: commands that conflict are ordered.

Two commands conflict if they access a common byte of a region and one of them writes it. That covers data passed from
one to the other, and arena bytes that buffers use one after another. It does not tell which of two ordered writes a
later read is meant to see: the compiler proves that (`nimblec.schedule.memory.overlaps`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nimblert.plan import Access, Command, Program, Record, Region, Switch, Target, Tensor, Wait, While, Work, pieces
from nimblert.plan.pieces import Touches, bodies_of
from nimblert.plan.records import DEFAULT_LIMITS, Limits

_Range: TypeAlias = tuple[str, int, int]
"""The name of a tensor, and the bytes of its region from which and to which it lies."""


@dataclass(frozen=True, slots=True)
class Order:
    """For each work command, in issue order: its stream, its number there (from 1), and its row.

    ``rows[row, stream]`` is the number of the last work of another stream that has ended before.
    """

    stream: NDArray[np.int32]
    number: NDArray[np.int32]
    row: NDArray[np.int32]
    rows: NDArray[np.int32]

    def before(self, early: NDArray[np.int64], late: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each pair whether ``early``, which is issued first, has ended when ``late`` starts."""
        streams = self.stream[early]
        ordered: NDArray[np.bool_] = self.rows[self.row[late], streams] >= self.number[early]
        ordered |= streams == self.stream[late]
        return ordered


def order(commands: Sequence[Command]) -> Order:
    """Return the order that streams and events impose on the ``commands`` of a verified program.

    Programmatic edges count like others: a kernel that starts early waits before it reads or writes.
    """
    stream_count = max((command.stream for command in commands), default=0) + 1
    rows = [np.zeros(stream_count, np.int32)]
    # For each stream, its current row.
    current = [0] * stream_count
    # For each stream, the number of its works so far.
    counts = [0] * stream_count
    events: dict[int, tuple[int, int, int]] = {}  # stream, its works and its row when the event was recorded
    streams: list[int] = []
    numbers: list[int] = []
    places: list[int] = []
    fresh: set[int] = set()  # streams whose row is not shared, and may be changed in place
    for command in commands:
        stream = command.stream
        match command:
            case Record():
                events[command.event] = stream, counts[stream], current[stream]
                fresh.discard(stream)
            case Wait():
                other, count, row = events[command.event]
                if stream not in fresh:
                    rows.append(rows[current[stream]].copy())
                    current[stream] = len(rows) - 1
                    fresh.add(stream)
                mine = rows[current[stream]]
                np.maximum(mine, rows[row], out=mine)
                mine[other] = max(mine[other], count)
            case _:
                counts[stream] += 1
                streams.append(stream)
                numbers.append(counts[stream])
                places.append(current[stream])
                fresh.discard(stream)
    return Order(np.array(streams, np.int32), np.array(numbers, np.int32), np.array(places, np.int32), np.array(rows))


_MOST_SENTENCES = 100
"""One missing wait may leave thousands of pairs unordered."""


def hazards(
    program: Program,
    limits: Limits = DEFAULT_LIMITS,
    *,
    target: Target = Target.CUDA,
    bodies: Sequence[Program] = (),
    given: Sequence[Access] = (),
) -> Iterator[str]:
    """Yield a sentence for each pair of unordered conflicting commands, and each read of unwritten bytes.

    Commands may run ``bodies``, which are examined too; what such a command reads is ``given``: written before. Only
    adjacent accesses to a byte are named, at most a hundred. Bytes of the arena are unwritten unless an input, an
    earlier command or, on the GPU, the reading command itself writes them. The CPU's accesses are exact, and the rule
    covers OUTPUT regions too: a run cannot return what an earlier run left in memory. All other rules must hold:
    indices, bounds, events. Near-linear in the accesses; for a program with more pieces than ``limits`` allows, the
    only sentence says so.
    """
    works = list(program.work)
    touched = pieces.touches([work for _, work in works])
    found = sum(pieces.count(accesses) for accesses in touched.values())
    if found > limits.pieces:
        return iter([f"the accesses of its commands fall into {found} pieces, the limit is {limits.pieces}"])
    own = _hazards(program, works, touched, target, bodies, given)
    of_bodies = (
        f"{_describe(program, placed)}: {found}"
        for placed in works
        for body in bodies_of(placed[1])
        for found in hazards(bodies[body], limits, target=target, bodies=bodies, given=pieces.reads(placed[1]))
    )
    return islice(chain(own, of_bodies), _MOST_SENTENCES)


def surely_written(work: Work, bodies: Sequence[Program]) -> Collection[Access]:
    """Return what every run of a command writes: a loop may end before its first trip, and a branch is one of several.

    Branches count where they write a whole range alike.
    """
    match work:
        case While():
            return ()
        case Switch():
            by_branch = (
                {access for _, inner in bodies[body].work for access in surely_written(inner, bodies)}
                for body in work.bodies
            )
            return frozenset.intersection(*map(frozenset, by_branch)) if work.bodies else ()
    return pieces.writes(work)


def _hazards(
    program: Program,
    works: Sequence[tuple[int, Work]],
    touched: dict[tuple[Region, int], Touches],
    target: Target,
    bodies: Sequence[Program],
    before: Sequence[Access],
) -> Iterator[str]:
    ordered = order(program.commands)
    for region, accesses in touched.items():
        for first, second, start, end in _unordered(accesses, ordered):
            yield (
                f"{_describe(program, works[first])} and {_describe(program, works[second])}: nothing orders "
                f"their accesses to {_name(*region)} bytes {start} to {end}"
            )
    exact = target is Target.CPU
    given, returned = _by_region(program.inputs), _by_region(program.outputs if exact else ())
    for access in before:
        start = access.pointer.offset
        given.setdefault((access.pointer.region, access.pointer.index), []).append(("", start, start + access.nbytes))
    if any(bodies_of(work) for _, work in works):
        touched = pieces.touches([work for _, work in works], partial(surely_written, bodies=bodies))
    for region in sorted(touched.keys() | returned.keys()):
        if region[0] is Region.ARENA or (exact and region[0] is Region.OUTPUT):
            accesses, where = touched.get(region, pieces.NOTHING), _name(*region)
            passed = given.get(region, []), returned.get(region, [])
            yield from _unwritten(program, works, accesses, where, *passed, exact=exact)


def _by_region(tensors: Iterable[Tensor]) -> dict[tuple[Region, int], list[_Range]]:
    """Return the tensors that are not empty by their regions."""
    found: dict[tuple[Region, int], list[_Range]] = {}
    for tensor in tensors:
        if tensor.span_nbytes:
            start, end = tensor.pointer.offset, tensor.pointer.offset + tensor.span_nbytes
            found.setdefault((tensor.pointer.region, tensor.pointer.index), []).append((tensor.name, start, end))
    return found


def _unordered(accesses: Touches, ordered: Order) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first work, second work, start, end) for pairs in the first piece in which they conflict."""
    streams = ordered.stream[accesses.work]
    if not accesses.write.any() or (streams == streams[0]).all():
        return
    found: set[tuple[int, int]] = set()
    for pairs in pieces.conflicts(accesses):
        for at in np.flatnonzero(~ordered.before(pairs.early, pairs.late)):
            works = int(pairs.early[at]), int(pairs.late[at])
            if works not in found:
                found.add(works)
                yield *works, int(pairs.start[at]), int(pairs.end[at])


def _unwritten(
    program: Program,
    works: Sequence[tuple[int, Work]],
    accesses: Touches,
    where: str,
    given: Sequence[_Range],
    returned: Sequence[_Range],
    *,
    exact: bool,
) -> Iterator[str]:
    """Yield a sentence for each read of bytes of a region that nothing has written before.

    ``given`` and ``returned`` are the inputs and outputs in the region, which messages call ``where``. Unless
    ``exact``, bytes that the reading command also writes are exempt: it may write them first.
    """
    ends = [(start, end) for _, start, end in (*given, *returned)]
    borders = np.unique(np.concatenate((pieces.cuts(accesses), np.array(ends, np.int64).reshape(-1))))
    written = _Growing(len(borders))

    def unwritten(start: int, end: int) -> str:
        """Return the first unwritten bytes of the pieces from ``start`` to ``end`` in words, "" if there are none."""
        first = written.first_missing(start)
        return f"{borders[first]} to {borders[min(end, written.first_present(first))]}" if first < end else ""

    for start, end in np.searchsorted(borders, ends[: len(given)]).tolist():
        written.add(start, end)
    by_time = np.lexsort((accesses.write if exact else ~accesses.write, accesses.work))
    columns = (np.searchsorted(borders, accesses.start), np.searchsorted(borders, accesses.end))
    rows = (column[by_time].tolist() for column in (*columns, accesses.work, accesses.write))
    for start, end, work, write in zip(*rows, strict=True):
        if write:
            written.add(start, end)
        elif found := unwritten(start, end):
            yield f"{_describe(program, works[work])}: reads {where} bytes {found}, which nobody wrote"
    for (name, *_), (start, end) in zip(returned, np.searchsorted(borders, ends[len(given) :]).tolist(), strict=True):
        if found := unwritten(start, end):
            yield f"output {name!r}: returns {where} bytes {found}, which nobody wrote"


class _Growing:
    """A growing set of numbers below ``count``; each costs constant time on average, however often it is added."""

    def __init__(self, count: int) -> None:
        self._missing = list(range(count + 1))  # a missing number leads to itself, others towards the next missing

    def first_missing(self, number: int) -> int:
        """Return the first number from ``number`` on that is not in the set; ``count`` never is."""
        missing = self._missing
        while missing[number] != number:
            missing[number] = missing[missing[number]]
            number = missing[number]
        return number

    def first_present(self, number: int) -> int:
        """Return the first number from ``number`` on that is in the set, or ``count``."""
        count = len(self._missing) - 1
        while number < count and self._missing[number] == number:
            number += 1
        return number

    def add(self, start: int, end: int) -> None:
        """Add all from ``start`` to below ``end``."""
        number = self.first_missing(start)
        while number < end:
            self._missing[number] = number + 1
            number = self.first_missing(number + 1)


def _describe(program: Program, placed: tuple[int, Work]) -> str:
    place, work = placed
    op = program.ops[work.op]
    return f"commands[{place}] ({type(work).__name__.lower()} of {op.name} {op.source!r})"


def _name(region: Region, index: int) -> str:
    name = region.name.lower()
    return f"{name} {index}" if region in {Region.INPUT, Region.OUTPUT} else name
