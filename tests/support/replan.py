"""Reschedule an existing plan: its commands as a graph, scheduled and lowered again."""

from dataclasses import replace

from nimblec.base.ir import (
    Access,
    Buffer,
    BufferKind,
    CopyWork,
    FillWork,
    Graph,
    KernelWork,
    Layout,
    Op,
    Reference,
    Schedule,
    Task,
    TensorView,
    Work,
)
from nimblec.plan.lower import lower
from nimblert import plan as p
from nimblert.plan import Command, Launch, Memcpy, Memset, Plan, Pointer, Program, Record, Region, Tensor, Wait

_KINDS = {
    Region.ARENA: BufferKind.TEMPORARY,
    Region.WEIGHTS: BufferKind.CONSTANT,
    Region.STATE: BufferKind.STATE,
    Region.INPUT: BufferKind.INPUT,
    Region.OUTPUT: BufferKind.OUTPUT,
}


def graph_of(plan: Plan) -> Graph:
    """Return the commands of a plan of one program as tasks, in issue order.

    Each region is one buffer, so tensors that share bytes of the arena are ordered as if one depended on the other: the
    graph is what the plan's memory layout permits. No op is opaque.
    """
    program = plan.programs[0]
    reader = _Reader(plan, program)
    return Graph(
        modules=plan.modules,
        kernels=plan.kernels,
        buffers=reader.buffers,
        ops=tuple(Op(name=op.name, source=op.source) for op in program.ops),
        tasks=reader.tasks(program),
        inputs=tuple(map(reader.view, program.inputs)),
        outputs=tuple(map(reader.view, program.outputs)),
    )


def replanned(plan: Plan, schedule: Schedule) -> Plan:
    """Return the plan with another schedule of `graph_of`, and the same memory."""
    program = plan.programs[0]
    graph = graph_of(plan)
    memory = Layout(
        offsets=(0,) * len(graph.buffers),
        arena_nbytes=program.arena_nbytes,
        weights_nbytes=plan.weights_nbytes,
        state_nbytes=plan.state_nbytes,
    )
    lowered = replace(lower(graph, schedule, memory, name=program.name), golden=program.golden)
    return replace(plan, programs=(lowered,))


def without(plan: Plan, position: int) -> Plan:
    """Return the plan without one of its commands."""
    program = plan.programs[0]
    commands = program.commands[:position] + program.commands[position + 1 :]
    return replace(plan, programs=(replace(program, commands=commands),))


def producer(commands: tuple[Command, ...], wait: int) -> int:
    """Return the position of the work that ``commands[wait]``, a wait, waits for."""
    awaited = commands[wait]
    assert isinstance(awaited, Wait)
    event, found = -1, -1
    last: dict[int, int] = {}
    for position, command in enumerate(commands[:wait]):
        if isinstance(command, Record):
            event, found = command.event, last[command.stream]
        elif not isinstance(command, Wait):
            last[command.stream] = position
        if event == awaited.event:
            break
    return found


class _Reader:
    """Translates pointers into regions to offsets in buffers."""

    def __init__(self, plan: Plan, program: Program) -> None:
        sizes = {
            (Region.ARENA, 0): program.arena_nbytes,
            (Region.WEIGHTS, 0): plan.weights_nbytes,
            (Region.STATE, 0): plan.state_nbytes,
            **{(Region.INPUT, i): nbytes for i, nbytes in enumerate(program.input_nbytes)},
            **{(Region.OUTPUT, i): nbytes for i, nbytes in enumerate(program.output_nbytes)},
        }
        self._numbers = {key: number for number, key in enumerate(sizes)}
        self.buffers = tuple(Buffer(kind=_KINDS[region], nbytes=nbytes) for (region, _), nbytes in sizes.items())

    def tasks(self, program: Program) -> tuple[Task, ...]:
        tasks: list[Task] = []
        last: dict[int, int] = {}
        for command in program.commands:
            if not isinstance(command, Record | Wait):
                early = isinstance(command, Launch) and command.programmatic
                tasks.append(self._task(command, last[command.stream] if early else None))
                last[command.stream] = len(tasks) - 1
        return tuple(tasks)

    def view(self, tensor: Tensor) -> TensorView:
        return TensorView(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=tensor.strides,
            buffer=self._number(tensor.pointer),
            offset=tensor.pointer.offset,
            sample_range=tensor.sample_range,
        )

    def _task(self, command: p.Work, programmatic_after: int | None) -> Task:
        work, reads, writes = self._work(command)
        return Task(
            op=command.op,
            work=work,
            reads=reads,
            writes=writes,
            programmatic_after=programmatic_after,
            duration_ns=command.duration_ns,
        )

    def _work(self, command: p.Work) -> tuple[Work, tuple[Access, ...], tuple[Access, ...]]:
        match command:
            case Memcpy():
                dst, src = self._access(command.dst, command.nbytes), self._access(command.src, command.nbytes)
                return CopyWork(dst=dst, src=src), (src,), (dst,)
            case Memset():
                dst = self._access(command.dst, command.count * command.element_nbytes)
                return FillWork(dst=dst, value=command.value, element_nbytes=command.element_nbytes), (), (dst,)
            case p.While() | p.Switch() | p.Crop():
                raise TypeError(f"{type(command).__name__}: expected a plan without loops, branches and crops")
            case Launch():
                reads = tuple(self._access(a.pointer, a.nbytes) for a in command.reads)
                writes = tuple(self._access(a.pointer, a.nbytes) for a in command.writes)
                return self._kernel(command), reads, writes

    def _kernel(self, launch: Launch) -> KernelWork:
        return KernelWork(
            kernel=launch.kernel,
            params=launch.params,
            references=tuple(
                Reference(param_offset=r.param_offset, buffer=self._number(r.pointer), offset=r.pointer.offset)
                for r in launch.relocations
            ),
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_smem_nbytes=launch.dynamic_smem_nbytes,
            cooperative=launch.cooperative,
        )

    def _access(self, pointer: Pointer, nbytes: int) -> Access:
        return Access(buffer=self._number(pointer), offset=pointer.offset, nbytes=nbytes)

    def _number(self, pointer: Pointer) -> int:
        return self._numbers[pointer.region, pointer.index]
