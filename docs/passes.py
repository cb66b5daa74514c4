"""The passes that both targets share, shown on a graph: tasks, order, streams, events, memory."""

from collections.abc import Iterator, Sequence

from plan_bytes import Lines, columns

from nimblec.base.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Schedule, Task
from nimblec.plan.interface import shape_text
from nimblec.plan.lower import lower
from nimblec.schedule import bound, check, matching, memory, streams
from nimblec.schedule.dag import transitive_reduction
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.lifetimes import Lifetimes, lifetimes
from nimblert.cuda import graph
from nimblert.plan import Command, Record, Wait


def tasks(graph: Graph) -> Lines:
    """The tasks of the graph, and its buffers."""

    def accesses(found: tuple[Access, ...]) -> str:
        return " ".join(f"b{a.buffer}[{a.offset}:{a.offset + a.nbytes}]" for a in found)

    rows: list[Sequence[object]] = [("task", "op", "reads", "writes")]
    rows += [
        (i, graph.ops[t.op].name.rpartition(".")[2], accesses(t.reads), accesses(t.writes))
        for i, t in enumerate(graph.tasks)
    ]
    yield from columns(rows)
    yield ""
    rows = [("buffer", "kind", "type", "bytes", "name")]
    rows += [
        (f"b{i}", b.kind.value, shape_text(b.dtype, b.shape), f"{b.nbytes:,}", b.name)
        for i, b in enumerate(graph.buffers)
    ]
    yield from columns(rows)


def order(graph: Graph) -> Lines:
    """The dependencies of each task, and their reduction."""
    dag = dependencies(graph)
    reduced = transitive_reduction(dag)
    yield f"dependencies: {' '.join(f'{before}->{after}' for before, after in dag.edges)}"
    dropped = sorted(set(dag.edges) - set(reduced.edges))
    implied = " ".join(f"{before}->{after}" for before, after in dropped) or "none"
    yield f"{len(dag.edges)} edges, {len(reduced.edges)} after the reduction; implied by others: {implied}"


def branching() -> Graph:
    """Seven tasks like those of an Inception block: three branches that write slices of one concatenation."""

    def task(op: int, reads: Sequence[tuple[int, int, int]], write: tuple[int, int, int]) -> Task:
        accesses = tuple(Access(buffer=b, offset=o, nbytes=n) for b, o, n in reads)
        buffer, offset, nbytes = write
        written = (Access(buffer=buffer, offset=offset, nbytes=nbytes),)
        work = KernelWork(kernel=0, params=b"", references=())
        return Task(op=op, work=work, reads=accesses, writes=written, duration_ns=1000)

    x, reduced, pooled, joined, y = range(5)
    sizes = (1024, 512, 1024, 4096, 1024)
    names = ("x", "reduced", "pooled", "joined", "y")
    kinds = (BufferKind.TEMPORARY,) * 4 + (BufferKind.OUTPUT,)
    work = (
        ("stem", (), (x, 0, 1024)),
        ("1x1", ((x, 0, 1024),), (joined, 0, 1024)),
        ("reduce", ((x, 0, 1024),), (reduced, 0, 512)),
        ("3x3", ((reduced, 0, 512),), (joined, 1024, 2048)),
        ("pool", ((x, 0, 1024),), (pooled, 0, 1024)),
        ("project", ((pooled, 0, 1024),), (joined, 3072, 1024)),
        ("add", ((joined, 0, 4096), (x, 0, 1024)), (y, 0, 1024)),
    )
    return Graph(
        modules=(),
        kernels=(),
        buffers=tuple(
            Buffer(kind=kind, nbytes=nbytes, name=name, shape=(nbytes,))
            for kind, nbytes, name in zip(kinds, sizes, names, strict=True)
        ),
        ops=tuple(Op(name=name, source="") for name, _, _ in work),
        tasks=tuple(task(op, reads, write) for op, (_, reads, write) in enumerate(work)),
        inputs=(),
        outputs=(),
    )


def chains(graph: Graph) -> Lines:
    """Algorithm 1 of Nimble: matching, chains and waits, and the proof that fewer streams are not enough."""
    dag = dependencies(graph)
    reduced = transitive_reduction(dag)
    matched = matching.maximum_matching(reduced)
    schedule = streams.maximal(dag)
    antichain = streams.certificate(dag)
    size = sum(after is not None for after in matched)
    yield f"matching: {' '.join(f'{t}->{after}' for t, after in enumerate(matched) if after is not None)}"
    for stream in range(schedule.stream_count):
        names = (graph.ops[graph.tasks[t].op].name for t in schedule.order if schedule.streams[t] == stream)
        yield f"stream {stream}: {' '.join(names)}"
    yield f"waits: {' '.join(f'{before}->{after}' for before, after in schedule.waits) or 'none'}"
    yield f"|E'| - |M| = {len(reduced.edges)} - {size} = {len(schedule.waits)} waits"
    yield f"antichain: tasks {' '.join(map(str, antichain)) or 'none'}, so {len(antichain)} streams are the fewest"
    yield f"checker: {len(list(check.problems(dag, schedule, antichain)))} problems"


def issued(commands: Sequence[Command], names: Sequence[str]) -> Lines:
    """Commands, one per line, with the edges that follow from streams and events."""
    derived = iter(graph.edges(commands))
    place = 0
    for command in commands:
        match command:
            case Record():
                text = f"record event {command.event}"
            case Wait():
                text = f"wait for event {command.event}"
            case _:
                before = " ".join(str(edge.source) for edge in next(derived)) or "nothing"
                text = f"launch {place} {names[command.op]}, after {before}"
                place += 1
        yield f"stream {command.stream}: {text}"


def commands_of_branches(graph: Graph) -> Lines:
    """The commands of the branching graph."""
    schedule = streams.maximal(dependencies(graph))
    program = lower(graph, schedule, memory.layout(graph, schedule))
    yield from issued(program.commands, [op.name for op in program.ops])


def arena(graph: Graph, schedule: Schedule) -> Lines:
    """The layout of the temporaries of digits."""
    placed, live = memory.layout(graph, schedule), lifetimes(graph, schedule)
    yield from columns(_arena_rows(graph, live, placed.offsets))
    yield f"one after the other: {int(live.sizes.sum()):,} bytes"
    yield f"arena: {placed.arena_nbytes:,} bytes, lower bound {bound.arena_lower_bound(live):,}"
    yield f"weights: {placed.weights_nbytes:,} bytes"


def _arena_rows(graph: Graph, live: Lifetimes, offsets: Sequence[int]) -> Iterator[Sequence[object]]:
    yield "buffer", "bytes", "from", "to", "used by tasks"
    for buffer, uses in zip(live.buffers, live.uses, strict=True):
        nbytes = graph.buffers[buffer].nbytes
        begin = offsets[buffer]
        yield f"b{buffer}", f"{nbytes:,}", f"{begin:,}", f"{begin + nbytes:,}", " ".join(map(str, uses))


def arenas(graph: Graph) -> Lines:
    """The arena of the branching graph under two schedules."""
    dag = dependencies(graph)
    for name, schedule in (("1", streams.serial(dag)), ("max", streams.maximal(dag))):
        placed = memory.layout(graph, schedule)
        live = lifetimes(graph, schedule)
        offsets = " ".join(f"{graph.buffers[b].name}@{placed.offsets[b]}" for b in live.buffers)
        yield (
            f"policy {name}: {placed.arena_nbytes} bytes, lower bound {bound.arena_lower_bound(live)}: {offsets}; "
            f"overlaps: {len(list(memory.overlaps(graph, schedule, placed)))}"
        )
