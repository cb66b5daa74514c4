"""Which buffers must be in memory together under a schedule.

A buffer's uses are the tasks that read it, write it or are handed its address. One buffer *precedes*
another if all its uses end before any use of the other starts; then, and only then, may they share
bytes. Neither precedes the other: they *conflict*.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nimblec.ir import BufferKind, Graph, KernelWork, Schedule, Task
from nimblec.schedule.dag import scheduled_ancestors, scheduled_descendants, task_set

ARENA_KINDS = (BufferKind.TEMPORARY, BufferKind.WORKSPACE)
"""The buffers that live in the arena, and may share it."""

_CHUNK = 256  # rows unpacked at a time: bounds the memory for ten thousand tasks to some 10 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The used buffers of the arena, by ascending index, and how they lie in time.

    ``uses[i]`` are the tasks that use ``buffers[i]``, in order of issue; ``sizes`` its bytes.
    ``precedes[i, j]``: every use of ``buffers[i]`` ends before any of ``buffers[j]`` starts.
    ``live_nbytes[task]``: bytes of the buffers with a use at or before ``task`` and one at or after.
    An arena buffer that holds a graph input is also used before every task, one that holds an
    output after every task: by two imagined tasks, numbered ``len(tasks)`` and ``len(tasks) + 1``.
    """

    buffers: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    sizes: NDArray[np.int64]
    precedes: NDArray[np.bool_]
    live_nbytes: NDArray[np.int64]

    @property
    def conflicts(self) -> NDArray[np.bool_]:
        """``[i, j]``: the buffers may not share bytes. Every buffer conflicts with itself."""
        return ~(self.precedes | self.precedes.T)


def used_buffers(graph: Graph) -> frozenset[int]:
    """Return the buffers that a task uses or that hold an input or output of ``graph``."""
    by_tasks = (buffer for task in graph.tasks for buffer in task_buffers(task))
    return frozenset(by_tasks) | {view.buffer for view in (*graph.inputs, *graph.outputs)}


def task_buffers(task: Task) -> frozenset[int]:
    """Return the buffers that ``task`` reads, writes or is handed the address of."""
    accessed = frozenset(access.buffer for access in (*task.reads, *task.writes))
    if isinstance(task.work, KernelWork):
        return accessed | {reference.buffer for reference in task.work.references}
    return accessed


def lifetimes(graph: Graph, schedule: Schedule) -> Lifetimes:
    """Return how the buffers of the arena lie in time under ``schedule``."""
    used: dict[int, list[int]] = {
        buffer: [] for buffer in sorted(used_buffers(graph)) if graph.buffers[buffer].kind in ARENA_KINDS
    }
    start, end = len(graph.tasks), len(graph.tasks) + 1
    for view in graph.inputs:
        if view.buffer in used:
            used[view.buffer].append(start)
    for task in schedule.order:
        for buffer in task_buffers(graph.tasks[task]) & used.keys():
            used[buffer].append(task)
    for view in graph.outputs:
        if view.buffer in used:
            used[view.buffer].append(end)
    everything = (1 << start) - 1
    after = (*(tasks | 1 << end for tasks in scheduled_descendants(schedule)), everything | 1 << end, 0)
    before = (*(tasks | 1 << start for tasks in scheduled_ancestors(schedule)), 0, everything | 1 << start)
    uses = tuple(tuple(dict.fromkeys(tasks)) for tasks in used.values())
    sizes = np.array([graph.buffers[buffer].nbytes for buffer in used], dtype=np.int64)
    return Lifetimes(
        buffers=tuple(used),
        uses=uses,
        sizes=sizes,
        precedes=_precedes(uses, after),
        live_nbytes=_live_nbytes(uses, sizes, before, after),
    )


def _precedes(uses: Sequence[Sequence[int]], after: Sequence[int]) -> NDArray[np.bool_]:
    """Return the matrix ``[i, j]``: all of ``uses[j]`` come after all of ``uses[i]``."""
    result = np.empty((len(uses), len(uses)), dtype=np.bool_)
    if not uses:
        return result
    flat = np.concatenate(uses)
    firsts = np.cumsum([0, *map(len, uses[:-1])])
    after_all = []
    for tasks in uses:
        common = after[tasks[0]]
        for task in tasks[1:]:
            common &= after[task]
        after_all.append(common)
    for row in range(0, len(uses), _CHUNK):
        bits = _unpack(after_all[row : row + _CHUNK], len(after))
        result[row : row + _CHUNK] = np.minimum.reduceat(bits[:, flat], firsts, axis=1)
    return result


def _live_nbytes(
    uses: Sequence[Sequence[int]], sizes: NDArray[np.int64], before: Sequence[int], after: Sequence[int]
) -> NDArray[np.int64]:
    """Return, for each task, the bytes of the buffers used both by then and from then on.

    Float64 sums are exact up to 2^53 bytes.
    """
    live = []
    for tasks in uses:
        until = since = task_set(tasks)
        for task in tasks:
            until |= before[task]
            since |= after[task]
        live.append(until & since)
    total = np.zeros(len(after))
    for row in range(0, len(uses), _CHUNK):
        total += sizes[row : row + _CHUNK].astype(np.float64) @ _unpack(live[row : row + _CHUNK], len(after))
    return total.astype(np.int64)


def _unpack(rows: Sequence[int], width: int) -> NDArray[np.uint8]:
    """Return the lowest ``width`` bits of each of ``rows``, one a byte: shape (rows, width)."""
    nbytes = (width + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(nbytes, "little") for row in rows), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(rows), nbytes), axis=1, count=width, bitorder="little")
