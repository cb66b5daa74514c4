"""Lifetimes: which buffers must be in memory together under a schedule.

A buffer's uses are the tasks that read it, write it or get its address. One buffer *precedes* another
if all its uses end before any use of the other starts; then, and only then, may they share bytes. If
neither precedes the other, they *conflict*.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nimblec.base.ir import BufferKind, Graph, KernelWork, Schedule, Task
from nimblec.schedule.dag import scheduled_ancestors, scheduled_descendants, task_set

ARENA_KINDS = (BufferKind.TEMPORARY, BufferKind.WORKSPACE)
"""The kinds of buffers in the arena."""

_CHUNK = 256  # rows unpacked at a time: bounds the memory for ten thousand tasks to some 10 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The used buffers of the arena, by ascending index, and their order in time.

    ``uses[i]`` are the tasks that use ``buffers[i]``, in order of issue; ``sizes`` its bytes.
    ``precedes[i, j]``: every use of ``buffers[i]`` ends before any of ``buffers[j]`` starts.
    An arena buffer that holds a graph input is also used before every task, one that holds an
    output after every task: by two virtual tasks, numbered ``len(tasks)`` and ``len(tasks) + 1``.
    """

    buffers: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    sizes: NDArray[np.int64]
    precedes: NDArray[np.bool_]

    @property
    def conflicts(self) -> NDArray[np.bool_]:
        """``[i, j]``: the buffers may not share bytes. Every buffer conflicts with itself."""
        return ~(self.precedes | self.precedes.T)


def used_buffers(graph: Graph) -> frozenset[int]:
    """Return the buffers that a task uses or that hold an input or output of ``graph``."""
    by_tasks = (buffer for task in graph.tasks for buffer in task_buffers(task))
    return frozenset(by_tasks) | {view.buffer for view in (*graph.inputs, *graph.outputs)}


def task_buffers(task: Task) -> frozenset[int]:
    """Return the buffers that ``task`` reads, writes or gets the address of."""
    accessed = frozenset(access.buffer for access in (*task.reads, *task.writes))
    if isinstance(task.work, KernelWork):
        return accessed | {reference.buffer for reference in task.work.references}
    return accessed


def lifetimes(graph: Graph, schedule: Schedule) -> Lifetimes:
    """Return the lifetimes of the arena's buffers under ``schedule``."""
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
    return Lifetimes(
        buffers=tuple(used),
        uses=uses,
        sizes=np.array([graph.buffers[buffer].nbytes for buffer in used], dtype=np.int64),
        precedes=_precedes(uses, before, after),
    )


def _precedes(uses: Sequence[Sequence[int]], before: Sequence[int], after: Sequence[int]) -> NDArray[np.bool_]:
    """Return the matrix ``[i, j]``: all of ``uses[j]`` come after all of ``uses[i]``.

    It suffices to look at the earliest of ``uses[j]``, which come after none of the others; mostly there is one.
    """
    after_all = []
    earliest: list[list[int]] = []
    for tasks in uses:
        common = after[tasks[0]]
        for task in tasks[1:]:
            common &= after[task]
        after_all.append(common)
        own = task_set(tasks)
        earliest.append([task for task in tasks if not before[task] & own])
    rounds = []
    for nth in range(max(map(len, earliest), default=0)):
        having = [index for index, tasks in enumerate(earliest) if len(tasks) > nth]
        rounds.append((np.array(having), np.array([earliest[index][nth] for index in having])))
    result = np.ones((len(uses), len(uses)), dtype=np.bool_)
    for row in range(0, len(uses), _CHUNK):
        bits = _unpack(after_all[row : row + _CHUNK], len(after))
        for columns, firsts in rounds:
            result[row : row + _CHUNK, columns] &= bits[:, firsts]
    return result


def _unpack(rows: Sequence[int], width: int) -> NDArray[np.bool_]:
    """Return the lowest ``width`` bits of each of ``rows``, one per byte: shape (rows, width)."""
    nbytes = (width + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(nbytes, "little") for row in rows), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), nbytes), axis=1, count=width, bitorder="little")
    return bits.view(np.bool_)
