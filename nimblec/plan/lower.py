"""Turn a scheduled graph into the program of a plan."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from nimblec.base import ir
from nimblec.base.errors import CompileError
from nimblec.schedule.lifetimes import used_buffers
from nimblert.plan import (
    Access,
    Command,
    Crop,
    Launch,
    Memcpy,
    Memset,
    Op,
    Pointer,
    Program,
    Record,
    Region,
    Relocation,
    Role,
    Switch,
    Tensor,
    Wait,
    Weight,
    While,
)
from nimblert.plan import Work as CommandWork
from nimblert.plan.pieces import SIZE_NBYTES

_REGIONS = {
    ir.BufferKind.CONSTANT: Region.WEIGHTS,
    ir.BufferKind.INPUT: Region.INPUT,
    ir.BufferKind.OUTPUT: Region.OUTPUT,
    ir.BufferKind.TEMPORARY: Region.ARENA,
    ir.BufferKind.WORKSPACE: Region.ARENA,
    ir.BufferKind.STATE: Region.STATE,
}

_Locate = Callable[[int, int], Pointer]


def lower(
    graph: ir.Graph,
    schedule: ir.Schedule,
    layout: ir.Layout,
    *,
    name: str = "main",
    bodies: list[Program] | None = None,
) -> Program:
    """Return the program that runs ``graph`` in this schedule and this memory, without a golden record.

    The n-th buffer of kind INPUT (or OUTPUT) becomes region INPUT(n) (or OUTPUT(n)). Ops that no
    task comes from are left out. The programs of its bodies are appended to ``bodies``, those of the plan.
    Raises CompileError for a fill of part of an element.
    """
    locate = _locator(graph, layout)
    ops, commands = _lowered(graph, schedule, _Scope(name, locate, [] if bodies is None else bodies))
    return Program(
        name=name,
        inputs=tuple(_tensor(view, locate) for view in graph.inputs),
        outputs=tuple(_tensor(view, locate) for view in graph.outputs),
        input_nbytes=_sizes(graph, ir.BufferKind.INPUT),
        output_nbytes=_sizes(graph, ir.BufferKind.OUTPUT),
        arena_nbytes=layout.arena_nbytes,
        stream_count=schedule.stream_count,
        event_count=len({before for before, _ in schedule.waits}),
        ops=ops,
        commands=commands,
    )


class _Scope(NamedTuple):
    """The program that a graph becomes: its name, the places of its buffers, and the bodies of the plan so far."""

    name: str
    locate: _Locate
    bodies: list[Program]


def _lowered(graph: ir.Graph, schedule: ir.Schedule, scope: _Scope) -> tuple[tuple[Op, ...], tuple[Command, ...]]:
    """Return the ops and commands of a program."""
    used_ops = sorted({op for task in graph.tasks for op in range(task.op, task.op + 1 + task.joined)})
    new_op = {op: index for index, op in enumerate(used_ops)}
    commands = tuple(_commands(graph, schedule, scope, new_op))
    return tuple(Op(name=graph.ops[op].name, source=graph.ops[op].source) for op in used_ops), commands


def _lower_body(graph: ir.Graph, call: ir.BodyCall, scope: _Scope) -> int:
    """Append the program of a body, and those of the bodies in it, to the plan's; return its index."""
    body = graph.bodies[call.body]
    inner, schedule, memory = body.graph, body.schedule, body.memory
    assert schedule is not None
    assert memory is not None
    outer = dict(zip(body.outer, call.buffers, strict=True))

    def locate(buffer: int, offset: int) -> Pointer:
        if buffer in outer:
            return scope.locate(outer[buffer], offset)
        place = memory.offsets[buffer] + offset
        if inner.buffers[buffer].kind is ir.BufferKind.CONSTANT:
            return Pointer(region=Region.WEIGHTS, offset=place)
        return scope.locate(call.scratch, place)

    index, name = len(scope.bodies), f"{scope.name}/{len(scope.bodies)}"
    empty = Program(
        name=name,
        inputs=(),
        outputs=(),
        input_nbytes=(),
        output_nbytes=(),
        arena_nbytes=0,
        stream_count=schedule.stream_count,
        event_count=len({before for before, _ in schedule.waits}),
        ops=(),
        commands=(),
        role=Role.BODY,
    )
    scope.bodies.append(empty)
    ops, commands = _lowered(inner, schedule, _Scope(name, locate, scope.bodies))
    scope.bodies[index] = replace(empty, ops=ops, commands=commands)
    return index


def weights(graph: ir.Graph, layout: ir.Layout) -> tuple[Weight, ...]:
    """Return the constants that ``graph`` uses, by ascending offset in the WEIGHTS region."""
    return _contents(graph, layout, ir.BufferKind.CONSTANT)


def state(graph: ir.Graph, layout: ir.Layout) -> tuple[Weight, ...]:
    """Return the state buffers that ``graph`` uses, by ascending offset in the STATE region."""
    return _contents(graph, layout, ir.BufferKind.STATE)


def _contents(graph: ir.Graph, layout: ir.Layout, kind: ir.BufferKind) -> tuple[Weight, ...]:
    found = []
    for index in sorted(used_buffers(graph)):
        buffer = graph.buffers[index]
        if buffer.kind is not kind or not buffer.nbytes:
            continue
        if buffer.data is None or buffer.data.nbytes != buffer.nbytes:
            raise CompileError(
                f"buffers[{index}] {buffer.name!r}: a {kind.value} of {buffer.nbytes} bytes needs as many "
                f"bytes of data, found {0 if buffer.data is None else buffer.data.nbytes}"
            )
        found.append(
            Weight(
                name=buffer.name,
                dtype=buffer.dtype,
                shape=buffer.shape,
                offset=layout.offsets[index],
                data=buffer.data,
            )
        )
    return tuple(sorted(found, key=lambda weight: weight.offset))


def _locator(graph: ir.Graph, layout: ir.Layout) -> _Locate:
    """Return the function from (buffer, offset in it) to its pointer."""
    seen = {ir.BufferKind.INPUT: 0, ir.BufferKind.OUTPUT: 0}
    indices = []
    for buffer in graph.buffers:
        indices.append(seen.get(buffer.kind, 0))
        if buffer.kind in seen:
            seen[buffer.kind] += 1

    def locate(buffer: int, offset: int) -> Pointer:
        return Pointer(
            region=_REGIONS[graph.buffers[buffer].kind],
            index=indices[buffer],
            offset=layout.offsets[buffer] + offset,
        )

    return locate


def _sizes(graph: ir.Graph, kind: ir.BufferKind) -> tuple[int, ...]:
    return tuple(buffer.nbytes for buffer in graph.buffers if buffer.kind is kind)


def _tensor(view: ir.TensorView, locate: _Locate) -> Tensor:
    return Tensor(
        name=view.name,
        dtype=view.dtype,
        shape=view.shape,
        strides=view.strides,
        pointer=locate(view.buffer, view.offset),
        sample_range=view.sample_range,
    )


def _commands(graph: ir.Graph, schedule: ir.Schedule, scope: _Scope, new_op: dict[int, int]) -> Iterator[Command]:
    """Yield the commands in issue order: a task's waits, its work, and the record of its event."""
    awaited: dict[int, list[int]] = {}
    for before, after in schedule.waits:
        awaited.setdefault(after, []).append(before)
    recorded = {before for before, _ in schedule.waits}
    events: dict[int, int] = {}
    last: dict[int, int] = {}
    for task in schedule.order:
        stream = schedule.streams[task]
        for event in sorted(events[before] for before in awaited.get(task, ())):
            yield Wait(stream=stream, event=event)
        work = graph.tasks[task]
        programmatic = stream in last and _starts_early(graph, task, last[stream])
        yield _work(graph, work, stream, new_op[work.op], scope, programmatic=programmatic)
        last[stream] = task
        if task in recorded:
            events[task] = len(events)
            yield Record(stream=stream, event=events[task])


def _starts_early(graph: ir.Graph, task: int, previous: int) -> bool:
    """Return whether a launch may start before that of ``previous``, on the same stream, has ended.

    A launch that was captured with a programmatic edge from another op's did not know what came before
    it: it waits for whatever does. One from within its op is for that launch alone.
    """
    before = graph.tasks[task].programmatic_after
    if before is None:
        return False
    is_launch = isinstance(graph.tasks[previous].work, ir.KernelWork)
    return before == previous or (is_launch and graph.tasks[before].op != graph.tasks[task].op)


def _work(
    graph: ir.Graph, task: ir.Task, stream: int, op: int, scope: _Scope, *, programmatic: bool
) -> CommandWork:
    locate = scope.locate
    shared = {"stream": stream, "op": op, "duration_ns": task.duration_ns}
    match task.work:
        case ir.KernelWork() as work:
            return Launch(
                **shared,
                kernel=work.kernel,
                params=work.params,
                relocations=tuple(
                    Relocation(param_offset=r.param_offset, pointer=locate(r.buffer, r.offset)) for r in work.references
                ),
                reads=_accesses(task.reads, locate),
                writes=_accesses(task.writes, locate),
                grid=work.grid,
                block=work.block,
                cluster=work.cluster,
                dynamic_smem_nbytes=work.dynamic_smem_nbytes,
                cooperative=work.cooperative,
                programmatic=programmatic,
            )
        case ir.CopyWork(dst=dst, src=src):
            return Memcpy(
                **shared,
                dst=locate(dst.buffer, dst.offset),
                src=locate(src.buffer, src.offset),
                nbytes=dst.nbytes,
            )
        case ir.FillWork(dst=dst, value=value, element_nbytes=element_nbytes):
            count, rest = divmod(dst.nbytes, element_nbytes)
            if rest:
                raise CompileError(
                    f"fill of buffer {dst.buffer}: {dst.nbytes} bytes are not a whole number of elements of "
                    f"{element_nbytes} bytes"
                )
            return Memset(
                **shared,
                dst=locate(dst.buffer, dst.offset),
                value=value,
                element_nbytes=element_nbytes,
                count=count,
            )
        case ir.CropWork(output=output, sizes=sizes):
            at = locate(sizes.buffer, sizes.offset)
            return Crop(**shared, output=output, sizes=at, rank=sizes.nbytes // SIZE_NBYTES)
        case ir.LoopWork() | ir.SwitchWork() as work:
            return _control_work(graph, work, scope, shared, task)


def _control_work(
    graph: ir.Graph, work: ir.LoopWork | ir.SwitchWork, scope: _Scope, shared: dict[str, int], task: ir.Task
) -> While | Switch:
    reads, writes = (_accesses(accesses, scope.locate) for accesses in (task.reads, task.writes))
    bodies = tuple(_lower_body(graph, call, scope) for call in ir.calls_of(work))
    if isinstance(work, ir.SwitchWork):
        index = scope.locate(work.index.buffer, work.index.offset)
        return Switch(**shared, index=index, bodies=bodies, reads=reads, writes=writes)
    condition = scope.locate(work.condition.buffer, work.condition.offset)
    return While(**shared, condition=condition, body=bodies[0], limit=work.limit, reads=reads, writes=writes)


def _accesses(accesses: tuple[ir.Access, ...], locate: _Locate) -> tuple[Access, ...]:
    return tuple(Access(pointer=locate(a.buffer, a.offset), nbytes=a.nbytes) for a in accesses)
