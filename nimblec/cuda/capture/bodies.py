"""Loops and branches of a capture: each body is recorded once, in line, and then becomes a graph of its own.

A recording holds the nodes of all bodies between those before and after them. A body's own values stay in its memory;
all else that it touches is memory of the graph around it. Values that a body would copy into its slots are computed
there, wherever the old values are no longer read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, fx

from nimblec.base.ir import (
    Access,
    Body,
    BodyCall,
    BufferKind,
    CopyWork,
    Graph,
    LoopWork,
    Op,
    SwitchWork,
    Task,
)
from nimblec.graph.control import Control, Loop, Switch, run_body
from nimblec.pytorch.source_tracker import SetSource, run_nodes
from nimblec.schedule.dependencies import renamed
from nimblec.schedule.lifetimes import task_buffers


@dataclass(slots=True, kw_only=True)
class RecordedBody:
    """The nodes [first, end) of a body; ``regions`` are the loops and branches in it, in order."""

    first: int
    end: int = 0
    regions: "list[Region]" = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A loop or branch: its bodies, and the address of its bool or index. ``limit`` is None for a branch."""

    source: str
    bodies: list[RecordedBody]
    decider: int
    limit: int | None = None


class RecordingRunner:
    """Runs each body of loops and branches once, and notes its nodes in ``regions``.

    ``count`` returns the number of nodes so far.
    """

    def __init__(self, count: Callable[[], int], set_source: SetSource) -> None:
        self.regions: list[Region] = []
        self._count, self._set_source = count, set_source

    def loop(self, loop: Loop, going: Tensor, slots: Sequence[Tensor], captured: Sequence[Tensor]) -> None:
        """Record a loop."""

        def trip() -> None:
            going.copy_(self._run(loop, loop.bodies[0], slots, captured)[0])

        body = self._recorded(trip)
        self.regions.append(Region(source=loop.name, bodies=[body], decider=going.data_ptr(), limit=loop.limit))

    def switch(
        self, switch: Switch, index: Tensor, slots: Sequence[Tensor], captured: Sequence[Sequence[Tensor]]
    ) -> None:
        """Record all bodies of a branch."""
        runs = zip(switch.bodies, captured, strict=True)
        bodies = [self._recorded(partial(self._run, switch, body, slots, given)) for body, given in runs]
        self.regions.append(Region(source="a branch", bodies=bodies, decider=index.data_ptr()))

    def _run(
        self, control: Control, body: fx.GraphModule, slots: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        return run_body(control, body, slots, given, lambda graph, args: run_nodes(graph, args, self._set_source))

    def _recorded(self, run: Callable[[], object]) -> RecordedBody:
        around, self.regions = self.regions, []
        body = RecordedBody(first=self._count(), regions=self.regions)
        try:
            run()
        finally:
            self.regions = around
        body.end = self._count()
        return body


def with_bodies(
    graph: Graph, regions: Sequence[Region], first_task: Callable[[int], int], byte_at: Callable[[int], Access]
) -> Graph:
    """Return a graph in which each region is one task, and its bodies are graphs.

    ``first_task`` gives the first task of a node or of those after it, ``byte_at`` the byte of a buffer at an address.
    """
    if not regions:
        return graph
    folder = _Folder(graph, first_task, byte_at)
    whole = RecordedBody(first=0, end=folder.end, regions=list(regions))
    tasks, bodies = folder.level(whole)
    return replace(graph, ops=tuple(folder.ops), tasks=tuple(tasks), bodies=tuple(bodies))


class _Folder:
    """Makes graphs of bodies out of the tasks of the whole recording, whose buffers have one numbering."""

    def __init__(self, graph: Graph, first_task: Callable[[int], int], byte_at: Callable[[int], Access]) -> None:
        self._graph, self._first_task, self._byte_at = graph, first_task, byte_at
        self.ops = list(graph.ops)
        self.end = 1 << 62
        self._uses: dict[int, tuple[int, int]] = {}
        """The first and the last task that touches each buffer."""
        for number, task in enumerate(graph.tasks):
            for buffer in task_buffers(task):
                self._uses[buffer] = self._uses.get(buffer, (number, number))[0], number

    def level(self, body: RecordedBody) -> tuple[list[Task], list[Body]]:
        """Return the tasks of a body, in the numbers of all buffers, and the bodies that they run."""
        tasks: list[Task] = []
        bodies: list[Body] = []
        at = self._first_task(body.first)
        for region in body.regions:
            first, end = self._first_task(region.bodies[0].first), self._first_task(region.bodies[-1].end)
            tasks += map(self._late, self._graph.tasks[at:first])
            tasks.append(self._control(region, bodies))
            at = end
        tasks += map(self._late, self._graph.tasks[at : self._first_task(body.end)])
        return tasks, bodies

    def _late(self, task: Task) -> Task:
        """Return a task that waits for all before it: its predecessor may be in another graph now."""
        return replace(task, programmatic_after=None)

    def _control(self, region: Region, bodies: list[Body]) -> Task:
        calls: list[BodyCall] = []
        reads: dict[Access, None] = {}
        writes: dict[Access, None] = {}
        for recorded in region.bodies:
            tasks, inner = self.level(recorded)
            span = range(self._first_task(recorded.first), self._first_task(recorded.end))
            for task in list(tasks):
                if isinstance(task.work, CopyWork) and self._is_local(task.work.src.buffer, span):
                    tasks = _without_copy(tasks, task.work)
            call, outside = self._body(tasks, inner, span, len(bodies), bodies)
            calls.append(call)
            reads |= dict.fromkeys(a for t in tasks for a in t.reads if a.buffer in outside)
            writes |= dict.fromkeys(a for t in tasks for a in t.writes if a.buffer in outside)
        decider = self._byte_at(region.decider)
        self.ops.append(Op(name="switch" if region.limit is None else "loop", source=region.source))
        return Task(
            op=len(self.ops) - 1,
            work=SwitchWork(index=decider, calls=tuple(calls))
            if region.limit is None
            else LoopWork(condition=decider, call=calls[0], limit=region.limit),
            reads=tuple(dict.fromkeys((decider, *reads))),
            writes=tuple(writes),
        )

    def _body(
        self, tasks: Sequence[Task], inner: Sequence[Body], span: range, number: int, bodies: list[Body]
    ) -> tuple[BodyCall, frozenset[int]]:
        """Append a body of these tasks; return its call, and the buffers that are memory of the graph around it."""
        used = sorted({buffer for task in tasks for buffer in task_buffers(task)})
        local = {buffer for buffer in used if self._is_local(buffer, span)}
        kinds = (BufferKind.CONSTANT, BufferKind.TEMPORARY, BufferKind.WORKSPACE)
        written = {access.buffer for task in tasks for access in task.writes}
        buffers = []
        for buffer in used:
            given = self._graph.buffers[buffer]
            is_own = buffer in local or given.kind is BufferKind.CONSTANT
            around = BufferKind.OUTPUT if buffer in written else BufferKind.INPUT
            buffers.append(given if is_own and given.kind in kinds else replace(given, kind=around, data=None))
        places = {buffer: place for place, buffer in enumerate(used)}
        graph = replace(
            self._graph,
            buffers=tuple(buffers),
            ops=tuple(self.ops),
            tasks=tuple(renamed(task, places.__getitem__) for task in tasks),
            inputs=(),
            outputs=(),
            weights=(),
            folded=frozenset(),
            bodies=tuple(inner),
        )
        body = Body(graph=graph)
        bodies.append(body)
        return BodyCall(body=number, buffers=tuple(used[place] for place in body.outer)), frozenset(used) - local

    def _is_local(self, buffer: int, span: range) -> bool:
        """Return whether the values of a buffer are those of one run of a body, as of libraries' scratch memory."""
        kind, (first, last) = self._graph.buffers[buffer].kind, self._uses[buffer]
        is_within = span.start <= first and last < span.stop
        return kind is BufferKind.WORKSPACE or (kind is BufferKind.TEMPORARY and is_within)


def _without_copy(tasks: list[Task], copy: CopyWork) -> list[Task]:
    """Return tasks that compute the source of a copy in its destination; the same tasks where one of them forbids it.

    Between the first and the last task that touch the source, only the last, which is then the copy, may touch the
    destination: even the first may still read the old value there while it writes the new one.
    """
    dst, src = copy.dst, copy.src
    touching = [number for number, task in enumerate(tasks) if src.buffer in task_buffers(task)]
    first, last = touching[0], touching[-1]
    accesses = (a for task in tasks for a in (*task.reads, *task.writes) if a.buffer == src.buffer)
    if (
        src.offset != dst.offset
        or any(a.offset < src.offset or a.offset + a.nbytes > src.offset + src.nbytes for a in accesses)
        or any(dst.buffer in task_buffers(task) for task in tasks[first:last])
    ):
        return tasks
    moved = (renamed(task, lambda buffer: dst.buffer if buffer == src.buffer else buffer) for task in tasks[first:last])
    return [*tasks[:first], *moved, *tasks[last + 1 :]]
