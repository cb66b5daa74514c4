"""Where each buffer goes: one arena, in which buffers share bytes only if the schedule orders them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nimblec.ir import BufferKind, Graph, Layout, Schedule
from nimblec.schedule.dag import scheduled_ancestors
from nimblec.schedule.lifetimes import ARENA_KINDS, Lifetimes, lifetimes, task_buffers, used_buffers

WEIGHT_ALIGNMENT = 256
"""Every tensor of the WEIGHTS and STATE regions starts at a multiple of this, as cudaMalloc's would."""

_REPAIRS = 8  # placements tried beyond the fixed orders, each with what stuck out placed first


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

    Compares each buffer with each other one by the definition, apart from how `layout` works. Also
    for each buffer that is not aligned, or not within its region.
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
    """Give the used buffers of ``kind`` offsets one after another; return the bytes they take."""
    end = 0
    for index in sorted(used_buffers(graph)):
        buffer = graph.buffers[index]
        if buffer.kind is kind:
            offsets[index] = _align(end, max(WEIGHT_ALIGNMENT, buffer.alignment))
            end = offsets[index] + buffer.nbytes
    return end


def _best_placement(live: Lifetimes, alignments: NDArray[np.int64], schedule: Schedule) -> NDArray[np.int64]:
    """Return the offsets of the placement with the lowest peak.

    After the fixed orders, the best one is repaired: the buffer that ends at the peak goes first.
    Stops at once when the bytes live at one task, below which no placement can go, are reached.
    """
    conflicts = live.conflicts
    bound = int(live.live_nbytes.max(initial=0))
    best = np.zeros(len(live.buffers), dtype=np.int64)
    best_order: Sequence[int] = ()
    best_peak = None
    for order in _orders(live, conflicts, schedule):
        offsets = _place(order, live.sizes, alignments, conflicts)
        peak = _peak(offsets, live.sizes)
        if best_peak is None or peak < best_peak:
            best, best_peak, best_order = offsets, peak, order
        if best_peak <= bound:
            return best
    for _ in range(_REPAIRS):
        top = int(np.argmax(best + live.sizes)) if best_order else 0
        best_order = (top, *(buffer for buffer in best_order if buffer != top))
        offsets = _place(best_order, live.sizes, alignments, conflicts)
        if best_peak is not None and _peak(offsets, live.sizes) < best_peak:
            best, best_peak = offsets, _peak(offsets, live.sizes)
        else:
            break
    return best


def _orders(live: Lifetimes, conflicts: NDArray[np.bool_], schedule: Schedule) -> Iterator[Sequence[int]]:
    """Yield the orders in which to place the buffers, those that most often win first."""
    count = len(live.buffers)
    if not count:
        return
    start = len(schedule.order)  # the imagined first task, and start + 1 the last (see Lifetimes)
    position = {start: -1, start + 1: start} | {task: place for place, task in enumerate(schedule.order)}
    first = np.array([min(position[task] for task in uses) for uses in live.uses])
    last = np.array([max(position[task] for task in uses) for uses in live.uses])
    pressure = np.array([max(live.live_nbytes[task] for task in uses) for uses in live.uses])
    crowd = conflicts @ live.sizes.astype(np.float64)
    index = np.arange(count)
    small = np.negative(live.sizes)
    for keys in (  # the last key counts most
        (index, first, small),
        (index, small, np.negative(pressure)),
        (index, small * (last - first + 1)),
        (index, small, first - last),
        (index, np.negative(crowd)),
        (index, small, first),
    ):
        yield np.lexsort(keys).tolist()


def _place(
    order: Iterable[int],
    sizes: NDArray[np.int64],
    alignments: NDArray[np.int64],
    conflicts: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Give each buffer, in ``order``, the tightest gap among those placed that it conflicts with.

    Where it fits none, it goes above them all.
    """
    starts = np.zeros(len(sizes), dtype=np.int64)
    ends = np.zeros(len(sizes), dtype=np.int64)
    placed = np.zeros(len(sizes), dtype=np.bool_)
    for buffer in order:
        size, alignment = int(sizes[buffer]), int(alignments[buffer])
        if size == 0:
            continue
        others = np.flatnonzero(conflicts[buffer] & placed)
        if len(others):
            others = others[np.argsort(starts[others], kind="stable")]
            floors = np.maximum.accumulate(ends[others])
            floors = np.concatenate(([0], -(-floors // alignment) * alignment))
            gaps = starts[others] - floors[:-1]
            fits = np.flatnonzero(gaps >= size)
            starts[buffer] = floors[fits[np.argmin(gaps[fits])]] if len(fits) else floors[-1]
        ends[buffer] = starts[buffer] + size
        placed[buffer] = True
    return starts


def _peak(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
    return int((offsets + sizes).max(initial=0))


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
