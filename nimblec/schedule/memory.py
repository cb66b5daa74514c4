"""Memory layout: one arena, in which buffers share bytes only if the schedule orders their uses."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nimblec.base.ir import BufferKind, Graph, Layout, Schedule
from nimblec.schedule.bound import arena_lower_bound
from nimblec.schedule.dag import scheduled_ancestors
from nimblec.schedule.lifetimes import ARENA_KINDS, Lifetimes, lifetimes, task_buffers, used_buffers

WEIGHT_ALIGNMENT = 256
"""Every tensor of the WEIGHTS and STATE regions starts at a multiple of this, as cudaMalloc's would."""

_ENOUGH = 1.02
"""A placement within this factor of the lower bound ends the search."""
_REPAIRS = 32
"""Repairs of the best placement that are tried at most."""
_REPAIRED_BUFFERS = 5_600
"""Buffers placed again by all repairs together, some 15 us each."""


def layout(graph: Graph, schedule: Schedule) -> Layout:
    """Return an offset for every buffer; the arena is the smallest of several greedy placements.

    Buffers that nothing uses stay at offset 0 and take no room.
    """
    offsets = [0] * len(graph.buffers)
    live = lifetimes(graph, schedule)
    alignments = np.array([graph.buffers[buffer].alignment for buffer in live.buffers], dtype=np.int64)
    placed = _best_placement(live, alignments, schedule)
    for buffer, offset in zip(live.buffers, placed, strict=True):
        offsets[buffer] = int(offset)
    weights_nbytes = _line_up(graph, BufferKind.CONSTANT, offsets)
    state_nbytes = _line_up(graph, BufferKind.STATE, offsets)
    return Layout(
        offsets=tuple(offsets),
        arena_nbytes=_peak(placed, live.sizes),
        weights_nbytes=weights_nbytes,
        state_nbytes=state_nbytes,
    )


def overlaps(graph: Graph, schedule: Schedule, layout: Layout) -> Iterator[str]:
    """Yield a sentence for each pair of arena buffers that share bytes while both may be in use.

    Compares all pairs of buffers by the definition, independently of `layout`. Also yields one for
    each buffer that is not aligned, or not within its region.
    """
    yield from _misplaced(graph, layout)
    before = scheduled_ancestors(schedule)
    used = sorted(used_buffers(graph))
    arena = [b for b in used if graph.buffers[b].kind in ARENA_KINDS and graph.buffers[b].nbytes]
    users = {b: [t for t in schedule.order if b in task_buffers(graph.tasks[t])] for b in arena}
    from_start = {view.buffer for view in graph.inputs}
    to_end = {view.buffer for view in graph.outputs}

    def precedes(first: int, second: int) -> bool:
        if first in to_end or second in from_start:
            return False
        return all(before[late] >> early & 1 for late in users[second] for early in users[first])

    for place, first in enumerate(arena):
        for second in arena[place + 1 :]:
            low = max(layout.offsets[first], layout.offsets[second])
            high = min(layout.offsets[b] + graph.buffers[b].nbytes for b in (first, second))
            if low < high and not precedes(first, second) and not precedes(second, first):
                yield (
                    f"buffers {first} ({graph.buffers[first].name!r}) and {second} "
                    f"({graph.buffers[second].name!r}): share arena bytes {low} to {high}, "
                    "though neither is finished before the other begins"
                )


def _misplaced(graph: Graph, layout: Layout) -> Iterator[str]:
    rooms = {
        BufferKind.TEMPORARY: layout.arena_nbytes,
        BufferKind.WORKSPACE: layout.arena_nbytes,
        BufferKind.CONSTANT: layout.weights_nbytes,
        BufferKind.STATE: layout.state_nbytes,
    }
    for index in sorted(used_buffers(graph)):
        buffer, offset = graph.buffers[index], layout.offsets[index]
        if offset % buffer.alignment:
            yield f"buffers {index}: offset {offset} is no multiple of its alignment {buffer.alignment}"
        room = rooms.get(buffer.kind, buffer.nbytes)
        if offset < 0 or offset + buffer.nbytes > room:
            yield f"buffers {index}: ends at {offset + buffer.nbytes}, beyond its region of {room} bytes"


def _line_up(graph: Graph, kind: BufferKind, offsets: list[int]) -> int:
    """Set consecutive ``offsets`` for the used buffers of ``kind``; return the bytes they take."""
    end = 0
    for index in sorted(used_buffers(graph)):
        buffer = graph.buffers[index]
        if buffer.kind is kind:
            offsets[index] = _align(end, max(WEIGHT_ALIGNMENT, buffer.alignment))
            end = offsets[index] + buffer.nbytes
    return end


def _best_placement(live: Lifetimes, alignments: NDArray[np.int64], schedule: Schedule) -> NDArray[np.int64]:
    """Return the offsets of the lowest placement found.

    Tries several fixed orders, then repairs the best of them: again and again the buffer that ends
    highest moves half the way to the front of the order. Stops near the lower bound.
    """
    enough = arena_lower_bound(live) * _ENOUGH
    conflicts = live.conflicts

    def place(order: Sequence[int]) -> tuple[int, NDArray[np.int64], Sequence[int]]:
        offsets = _place(order, live.sizes, alignments, conflicts)
        return _peak(offsets, live.sizes), offsets, order

    orders = _orders(live, conflicts, schedule)
    best = latest = place(next(orders))
    for order in orders:
        if best[0] <= enough:
            break
        latest = best = min(best, place(order), key=lambda placement: placement[0])
    for _ in range(min(_REPAIRS, _REPAIRED_BUFFERS // max(1, len(live.buffers)))):
        if best[0] <= enough:
            break
        latest = place(_repaired(latest[2], latest[1] + live.sizes))
        best = min(best, latest, key=lambda placement: placement[0])
    return best[1]


def _repaired(order: Sequence[int], ends: NDArray[np.int64]) -> Sequence[int]:
    """Return ``order`` with the buffer that ends highest moved half the way to the front."""
    top = int(np.argmax(ends))
    place = order.index(top)
    return (*order[: place // 2], top, *(buffer for buffer in order[place // 2 :] if buffer != top))


def _orders(live: Lifetimes, conflicts: NDArray[np.bool_], schedule: Schedule) -> Iterator[Sequence[int]]:
    """Yield the orders in which to place the buffers, the most successful first.

    By size, by the number and the bytes of conflicting buffers, and by mixtures of these, the largest first.
    """
    start = len(schedule.order)  # the virtual first task; start + 1 is the last (see Lifetimes)
    position = {start: -1, start + 1: start} | {task: place for place, task in enumerate(schedule.order)}
    first = np.array([min(position[task] for task in uses) for uses in live.uses])
    large = live.sizes.astype(np.float64)
    crowd = conflicts @ large  # bytes of conflicting buffers
    rivals = conflicts.sum(axis=1)
    magnitude = np.floor(np.log2(np.maximum(large, 1)))
    for keys in (  # the last key counts most
        (large,),
        (large * rivals,),
        (large * crowd,),
        (large, crowd),
        (large, rivals),
        (crowd, magnitude),
    ):
        yield np.lexsort((first, *map(np.negative, keys))).tolist()


def _place(
    order: Sequence[int],
    sizes: NDArray[np.int64],
    alignments: NDArray[np.int64],
    conflicts: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Place each buffer, in ``order``, into the tightest gap between the placed buffers that it conflicts with.

    If it fits into none, it goes above them all.
    """
    offsets = np.zeros(len(sizes), dtype=np.int64)
    # The placed buffers, by start.
    who, starts, ends = (np.zeros(len(sizes), dtype=np.int64) for _ in range(3))
    count = 0
    for buffer in order:
        size, alignment = int(sizes[buffer]), int(alignments[buffer])
        if size == 0:
            continue
        others = np.flatnonzero(conflicts[buffer].take(who[:count]))
        floors = np.zeros(len(others) + 1, dtype=np.int64)
        np.maximum.accumulate(ends.take(others), out=floors[1:])
        floors += -floors % alignment
        gaps = starts.take(others) - floors[:-1]
        fits = np.flatnonzero(gaps >= size)
        offset = int(floors[fits[np.argmin(gaps[fits])]] if len(fits) else floors[-1])
        at = int(np.searchsorted(starts[:count], offset))
        for row, value in ((who, buffer), (starts, offset), (ends, offset + size)):
            row[at + 1 : count + 1] = row[at:count]
            row[at] = value
        offsets[buffer] = offset
        count += 1
    return offsets


def _peak(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
    return int((offsets + sizes).max(initial=0))


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
