"""The proof that a schedule has as many streams as it needs: work of which none waits for the other.

By Dilworth's theorem the tasks of a graph fall into as many chains as its largest antichain has
members. Whoever shows an antichain shows that a schedule on fewer streams orders some of its members
without need.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from nimblert.edges import edges
from nimblert.hazards import reads, writes
from nimblert.plan import Access, Program, Record, Region, ScheduleRecord, Wait, Work


def problems(program: Program, record: ScheduleRecord) -> Iterator[str]:
    """Yield a sentence for each claim of ``record`` that does not hold of the program.

    Policy "max" must leave its antichain unordered: by streams and events, and so, in a program
    without hazards, by any accesses that conflict; and needs no more streams than that. Other
    policies order more than they must, so there the antichain is held against what the data order.
    """
    works = [(i, c) for i, c in enumerate(program.commands) if not isinstance(c, Record | Wait)]
    widest = is_widest(record.policy)
    before = _closure(_scheduled(program) if widest else _required([work for _, work in works]))
    members = sum(1 << member for member in record.antichain)
    for member in record.antichain:
        if ordered := before[member] & members:
            first, second = (works[i][0] for i in (ordered.bit_length() - 1, member))
            reason = "streams and events" if widest else "accesses"
            yield f"antichain: commands[{second}] comes after commands[{first}] by their {reason}"
    limit = len(record.antichain) if widest else int(record.policy) if record.policy.isdecimal() else None
    if limit is not None and program.stream_count > limit:
        yield f"policy {record.policy!r}: {program.stream_count} streams, expected at most {limit}"
    yield from _candidate_problems(program, record)


def is_widest(policy: str) -> bool:
    """Whether a policy promises all concurrency on the fewest streams."""
    return policy.partition("-")[0] == "max"


def _candidate_problems(program: Program, record: ScheduleRecord) -> Iterator[str]:
    """The candidate that was kept is this program."""
    syncs = sum(isinstance(command, Wait) for command in program.commands)
    actual = (program.stream_count, syncs, program.arena_nbytes)
    for i, candidate in enumerate(record.candidates):
        claimed = (candidate.stream_count, candidate.sync_count, candidate.arena_nbytes)
        if candidate.policy == record.policy and claimed != actual:
            yield f"candidates[{i}]: streams, syncs and arena are {claimed}, those of the program {actual}"


def _closure(dependencies: Iterable[Iterable[int]]) -> list[int]:
    """Everything before each work, as bits, from what each directly depends on."""
    before: list[int] = []
    for sources in dependencies:
        found = 0
        for source in sources:
            found |= before[source] | 1 << source
        before.append(found)
    return before


def _scheduled(program: Program) -> list[list[int]]:
    """What the streams and events put before each work."""
    return [[edge.source for edge in row] for row in edges(program.commands)]


def _required(works: Sequence[Work]) -> Iterator[set[int]]:
    """Yield what each work must come after, whatever the schedule, as far as a plan can tell.

    Outside the arena no bytes serve two buffers, so all conflicting accesses keep their order. In
    the arena a write may start another buffer's turn, and orders nothing; a read comes after the
    last write. Bytes that a work both reads and writes there may be scratch memory, and order nothing.
    """
    histories: dict[tuple[Region, int], _History] = {}
    for index, work in enumerate(works):
        required: set[int] = set()
        written = [access for access in writes(work) if access.nbytes]
        for access in written:
            if access.pointer.region is Region.ARENA:  # first: a read of these bytes finds the work itself
                _history(histories, access).write(access, index)
        for access in reads(work):
            if access.nbytes and access.pointer.region is not Region.WEIGHTS:
                required |= _history(histories, access).read(access, index)
        for access in written:
            if access.pointer.region is not Region.ARENA:
                required |= _history(histories, access).write(access, index)
        yield required - {index}


def _history(histories: dict[tuple[Region, int], "_History"], access: Access) -> "_History":
    return histories.setdefault((access.pointer.region, access.pointer.index), _History())


class _History:
    """Who wrote each byte of a region last, and who has read it since; pieces from start to start."""

    def __init__(self) -> None:
        self._starts = [0]
        self._writers: list[frozenset[int]] = [frozenset()]
        self._readers: list[frozenset[int]] = [frozenset()]

    def read(self, access: Access, work: int) -> set[int]:
        """Note a read, and return who wrote its bytes."""
        pieces = self._pieces(access)
        for place in range(len(self._starts))[pieces]:
            self._readers[place] |= {work}
        return set().union(*self._writers[pieces])

    def write(self, access: Access, work: int) -> set[int]:
        """Note a write, and return who wrote its bytes and who has read them."""
        pieces = self._pieces(access)
        before = set().union(*self._writers[pieces], *self._readers[pieces])
        self._starts[pieces] = [access.pointer.offset]
        self._writers[pieces] = [frozenset({work})]
        self._readers[pieces] = [frozenset()]
        return before

    def _pieces(self, access: Access) -> slice:
        first = self._cut(access.pointer.offset)
        return slice(first, self._cut(access.pointer.offset + access.nbytes))

    def _cut(self, at: int) -> int:
        """The piece that starts at ``at``, made if there is none."""
        place = bisect_left(self._starts, at)
        if place == len(self._starts) or self._starts[place] != at:
            self._starts.insert(place, at)
            self._writers.insert(place, self._writers[place - 1])
            self._readers.insert(place, self._readers[place - 1])
        return place
