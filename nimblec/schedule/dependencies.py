"""Dependencies between tasks, from the bytes that they read and write."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nimblec.base.ir import (
    Access,
    BodyCall,
    Buffer,
    BufferKind,
    CopyWork,
    CropWork,
    FillWork,
    Graph,
    KernelWork,
    LoopWork,
    SwitchWork,
    Task,
    Work,
)
from nimblec.schedule.dag import Dag, ancestors, descendants


def dependencies(graph: Graph) -> Dag:
    """Return what each task of ``graph`` must come after.

    Two tasks keep their captured order if they touch a common byte and one of them writes it, or if
    they stand next to each other in an opaque op. Constants order nothing. Of several writers of a byte
    only the latest is a predecessor: it implies the others.
    """
    histories: defaultdict[int, list[_Segment]] = defaultdict(list)
    last_of_op: dict[int, int] = {}
    predecessors = []
    for index, task in enumerate(graph.tasks):
        before: set[int] = set()
        for access in _ordering(task.reads, graph.buffers):
            before |= _read(histories[access.buffer], access, index)
        for access in _ordering(task.writes, graph.buffers):
            before |= _write(histories[access.buffer], access, index)
        if graph.ops[task.op].opaque and task.op in last_of_op:
            before.add(last_of_op[task.op])
        last_of_op[task.op] = index
        predecessors.append(tuple(sorted(before - {index})))
    return Dag(predecessors=tuple(predecessors))


def programmatic_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return the (before, after) that were captured with a programmatic edge; they order nothing by themselves."""
    return tuple(
        (task.programmatic_after, index)
        for index, task in enumerate(graph.tasks)
        if task.programmatic_after is not None
    )


def with_programmatic_edges(dag: Dag, graph: Graph) -> Dag:
    """Return ``dag`` with the programmatic edges of ``graph`` as dependencies: its launches stay side by side."""
    predecessors = [set(before) for before in dag.predecessors]
    for before, after in programmatic_edges(graph):
        predecessors[after].add(before)
    return Dag(predecessors=tuple(tuple(sorted(before)) for before in predecessors))


def close_gaps(graph: Graph) -> Graph:
    """Return ``graph`` with a task's accesses to a buffer merged into one, wherever that adds no dependency.

    It adds none if all tasks that touch the buffer (if the task only reads it, all that write it) come before or
    after the task anyway. A plan stores and checks each access, so fewer are better.
    """
    dag = dependencies(graph)
    writers: defaultdict[int, int] = defaultdict(int)
    touching: defaultdict[int, int] = defaultdict(int)
    for index, task in enumerate(graph.tasks):
        for access in task.writes:
            writers[access.buffer] |= 1 << index
        for access in (*task.reads, *task.writes):
            touching[access.buffer] |= 1 << index
    tasks = []
    for index, (task, before, after) in enumerate(zip(graph.tasks, ancestors(dag), descendants(dag), strict=True)):
        beside = ~(before | after | 1 << index)
        read, written = ({access.buffer for access in accesses} for accesses in (task.reads, task.writes))
        apart = {n for n in read | written if (touching if n in written else writers)[n] & beside}
        tasks.append(replace(task, reads=_closed(task.reads, apart), writes=_closed(task.writes, apart)))
    return replace(graph, tasks=tuple(tasks))


def _closed(accesses: Sequence[Access], apart: Collection[int]) -> tuple[Access, ...]:
    """Return the accesses to buffers ``apart`` as they are; merge those to each other buffer, first to last byte."""
    hulls: dict[int, Access] = {}
    for access in accesses:
        if access.buffer not in apart:
            one = hulls.get(access.buffer, access)
            begin, end = min(one.offset, access.offset), max(one.offset + one.nbytes, access.offset + access.nbytes)
            hulls[access.buffer] = Access(buffer=access.buffer, offset=begin, nbytes=end - begin)
    return (*(access for access in accesses if access.buffer in apart), *hulls.values())


def rename_workspaces(graph: Graph) -> Graph:
    """Return ``graph`` with a workspace of its own for every op.

    A library hands the same scratch memory to op after op. Contents do not flow from one op to the
    next, so sharing it would order ops that are independent.
    """
    buffers = list(graph.buffers)
    names: dict[tuple[int, int], int] = {}
    owned: set[int] = set()

    def name(op: int, buffer: int) -> int:
        if graph.buffers[buffer].kind is not BufferKind.WORKSPACE:
            return buffer
        if (op, buffer) not in names:
            names[op, buffer] = len(buffers) if buffer in owned else buffer
            if buffer in owned:
                buffers.append(graph.buffers[buffer])
            owned.add(buffer)
        return names[op, buffer]

    tasks = tuple(renamed(task, partial(name, task.op)) for task in graph.tasks)
    return replace(graph, buffers=tuple(buffers), tasks=tasks)


@dataclass(slots=True)
class _Segment:
    """Bytes ``start`` to ``end`` of a buffer: who wrote them last and who has read them since."""

    start: int
    end: int
    writer: int | None
    readers: list[int]


def _read(segments: list[_Segment], access: Access, task: int) -> set[int]:
    """Record the read in ``segments``, and return the tasks that it must come after."""
    end = access.offset + access.nbytes
    at, inside = _take(segments, access.offset, end)
    pieces = []
    covered = access.offset
    for segment in inside:
        if covered < segment.start:
            pieces.append(_Segment(covered, segment.start, None, []))
        pieces.append(segment)
        covered = segment.end
    if covered < end:
        pieces.append(_Segment(covered, end, None, []))
    for piece in pieces:
        piece.readers.append(task)
    segments[at:at] = pieces
    return {piece.writer for piece in pieces if piece.writer is not None}


def _write(segments: list[_Segment], access: Access, task: int) -> set[int]:
    """Record the write in ``segments``, and return the tasks that it must come after."""
    end = access.offset + access.nbytes
    at, inside = _take(segments, access.offset, end)
    segments.insert(at, _Segment(access.offset, end, task, []))
    writers = {segment.writer for segment in inside if segment.writer is not None}
    return writers.union(*(segment.readers for segment in inside))


def _take(segments: list[_Segment], start: int, end: int) -> tuple[int, list[_Segment]]:
    """Cut bytes ``start`` to ``end`` out of the sorted ``segments``.

    Return the index of the hole, and the segments that were in it.
    """
    first = bisect_right(segments, start, key=lambda segment: segment.end)
    last = bisect_left(segments, end, first, key=lambda segment: segment.start)
    inside = segments[first:last]
    left, right = [], []
    if inside and inside[0].start < start:
        left = [replace(inside[0], end=start, readers=inside[0].readers.copy())]
    if inside and end < inside[-1].end:
        right = [replace(inside[-1], start=end, readers=inside[-1].readers.copy())]
    if left:
        inside[0].start = start
    if right:
        inside[-1].end = end
    segments[first:last] = left + right
    return first + len(left), inside


def _ordering(accesses: Sequence[Access], buffers: Sequence[Buffer]) -> Iterator[Access]:
    """Yield the accesses that can order tasks."""
    for access in accesses:
        if access.nbytes and buffers[access.buffer].kind is not BufferKind.CONSTANT:
            yield access


def renamed(task: Task, name: Callable[[int], int]) -> Task:
    """Return a task that uses the buffer ``name(b)`` wherever it used ``b``."""
    return replace(
        task,
        work=_work(task.work, name),
        reads=_accesses(task.reads, name),
        writes=_accesses(task.writes, name),
    )


def _accesses(accesses: Sequence[Access], name: Callable[[int], int]) -> tuple[Access, ...]:
    return tuple(_access(access, name) for access in accesses)


def _access(access: Access, name: Callable[[int], int]) -> Access:
    return replace(access, buffer=name(access.buffer))


def _work(work: Work, name: Callable[[int], int]) -> Work:
    match work:
        case KernelWork():
            return replace(work, references=tuple(replace(r, buffer=name(r.buffer)) for r in work.references))
        case CopyWork():
            return replace(work, dst=_access(work.dst, name), src=_access(work.src, name))
        case FillWork():
            return replace(work, dst=_access(work.dst, name))
        case CropWork():
            return replace(work, sizes=_access(work.sizes, name))
        case LoopWork():
            return replace(work, condition=_access(work.condition, name), call=_call(work.call, name))
        case SwitchWork():
            calls = tuple(_call(call, name) for call in work.calls)
            return replace(work, index=_access(work.index, name), calls=calls)


def _call(call: BodyCall, name: Callable[[int], int]) -> BodyCall:
    scratch = call.scratch if call.scratch < 0 else name(call.scratch)
    return replace(call, buffers=tuple(map(name, call.buffers)), scratch=scratch)
