"""The proof that a schedule has no more streams than it needs: an antichain, work that may run concurrently.

By Dilworth's theorem, the tasks of a graph can be split into as many chains as its largest antichain has
members. So an antichain proves that a schedule on fewer streams orders some of its members needlessly.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from nimblert.check.hazards import order
from nimblert.plan import Program, Region, ScheduleRecord, Wait, Work, pieces

_MOST_SENTENCES = 100


def problems(program: Program, record: ScheduleRecord) -> Iterator[str]:
    """Yield a sentence for each claim of ``record`` that does not hold of the program, at most a hundred.

    Policy "max" must leave its antichain unordered: by streams and events, and so, in a program
    without hazards, by any accesses that conflict; and needs no more streams than that. Other
    policies order more than they must, so there the antichain is held against what the data order.
    """
    return islice(_problems(program, record), _MOST_SENTENCES)


def _problems(program: Program, record: ScheduleRecord) -> Iterator[str]:
    works = list(program.work)
    widest = is_widest(record.policy)
    members = record.antichain
    pairs = _scheduled(program, members) if widest else _required([work for _, work in works], members)
    reason = "streams and events" if widest else "accesses"
    for early, late in pairs:
        yield f"antichain: commands[{works[late][0]}] comes after commands[{works[early][0]}] by their {reason}"
    limit = len(members) if widest else int(record.policy) if record.policy.isdecimal() else None
    if limit is not None and program.stream_count > limit:
        yield f"policy {record.policy!r}: {program.stream_count} streams, expected at most {limit}"
    yield from _candidate_problems(program, record)


def is_widest(policy: str) -> bool:
    """Return whether a policy promises all concurrency on the fewest streams."""
    return policy.partition("-")[0] == "max"


def _candidate_problems(program: Program, record: ScheduleRecord) -> Iterator[str]:
    """Yield the candidate that was kept is this program."""
    syncs = sum(isinstance(command, Wait) for command in program.commands)
    actual = (program.stream_count, syncs, program.arena_nbytes)
    for i, candidate in enumerate(record.candidates):
        claimed = (candidate.stream_count, candidate.sync_count, candidate.arena_nbytes)
        if candidate.policy == record.policy and claimed != actual:
            yield f"candidates[{i}]: streams, syncs and arena are {claimed}, those of the program {actual}"


def _scheduled(program: Program, members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each member that streams and events order after others, behind the last of these."""
    ordered = order(program.commands)
    earlier = np.array(members, np.int64)
    for count, member in enumerate(members):
        before = np.flatnonzero(ordered.before(earlier[:count], np.full(count, member)))
        if len(before):
            yield members[before[-1]], member


def _required(works: Sequence[Work], members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each member that the data order after others, behind the last of these.

    As far as a plan can tell: outside the arena no bytes serve two buffers, so all conflicting
    accesses keep their order. In the arena a write may start another buffer's turn, and orders
    nothing; a read comes after the last write. Bytes that a work both reads and writes there may be
    scratch memory, and order nothing.
    """
    among = frozenset(members)
    # For each command, the last earlier member.
    before = [-1] * len(works)
    for early, late in _data_edges(works):
        before[late] = max(before[late], before[early], early if early in among else -1)
    for member in members:
        if before[member] >= 0:
            yield before[member], member


def _data_edges(works: Sequence[Work]) -> list[list[int]]:
    """Return pairs of works whose data order the first before the second, ascending by the second."""
    edges = []
    for (region, _), touched in pieces.touches(works).items():
        for pairs in pieces.conflicts(touched) if touched.write.any() else ():
            ordering = ~pairs.late_writes if region is Region.ARENA else np.full(len(pairs.late), fill_value=True)
            edges.append(np.stack((pairs.late, pairs.early), axis=1)[ordering])
    found = np.unique(np.concatenate(edges), axis=0) if edges else np.zeros((0, 2), np.int64)
    return list(map(list, found[:, ::-1].tolist()))
