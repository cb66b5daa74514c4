"""Graphs for the tests of scheduling, memory and lowering: small ones by hand, random ones by hypothesis."""

from random import Random

from hypothesis import strategies as st
from random_schedules import random_schedule

from nimblec.base.ir import Access, Buffer, BufferKind, Graph, KernelWork, Op, Schedule, Task, TensorView
from nimblec.schedule.dag import Dag
from nimblec.schedule.streams import critical_path, limited, maximal, serial


def access(buffer: int, offset: int = 0, nbytes: int = 64) -> Access:
    """Return an access to ``nbytes`` bytes of a buffer, with positional arguments."""
    return Access(buffer=buffer, offset=offset, nbytes=nbytes)


def kernel(
    reads: tuple[Access, ...], writes: tuple[Access, ...], *, op: int = 0, programmatic_after: int | None = None
) -> Task:
    """Return a launch of kernel 0 that needs no parameters."""
    work = KernelWork(kernel=0, params=b"", references=())
    return Task(op=op, work=work, reads=reads, writes=writes, programmatic_after=programmatic_after)


def graph(
    buffers: list[Buffer],
    tasks: list[Task],
    *,
    opaque: tuple[int, ...] = (),
    inputs: tuple[TensorView, ...] = (),
    outputs: tuple[TensorView, ...] = (),
) -> Graph:
    """Return a graph whose ops are named by their number."""
    count = max((task.op for task in tasks), default=-1) + 1
    ops = tuple(Op(name=f"op{index}", source="", opaque=index in opaque) for index in range(count))
    return Graph(
        modules=(), kernels=(), buffers=tuple(buffers), ops=ops, tasks=tuple(tasks), inputs=inputs, outputs=outputs
    )


def temporaries(*sizes: int) -> list[Buffer]:
    """Return one temporary buffer for each size."""
    return [Buffer(kind=BufferKind.TEMPORARY, nbytes=nbytes) for nbytes in sizes]


def dataflow(*sources: tuple[int, ...], sizes: tuple[int, ...] = ()) -> Graph:
    """Return a graph whose task ``i`` writes ``sizes[i]`` (64) bytes and reads what tasks ``sources[i]`` wrote."""
    nbytes = sizes or (64,) * len(sources)
    tasks = [
        kernel(tuple(access(s, 0, nbytes[s]) for s in before), (access(i, 0, nbytes[i]),), op=i)
        for i, before in enumerate(sources)
    ]
    return graph(temporaries(*nbytes), tasks)


def random_graph(random: Random, task_count: int, *, chained: bool = True) -> Graph:
    """Draw a graph with buffers of all kinds; tasks read only bytes of the arena that have been written.

    ``chained``: some ops are opaque, some edges programmatic.
    """
    kinds = [kind for kind in BufferKind for _ in range(random.randint(1, 3))]
    buffers = [Buffer(kind=kind, nbytes=random.randint(1, 40), alignment=8) for kind in kinds]
    op_count = max(1, task_count // 2)
    ops = sorted(random.randrange(op_count) for _ in range(task_count))
    written: list[tuple[int, Access]] = []
    tasks = []
    for index, op in enumerate(ops):
        reads = []
        for _ in range(random.randint(0, 2)):
            buffer = random.randrange(len(buffers))
            if buffers[buffer].kind is BufferKind.TEMPORARY:
                known = [a for _, a in written if a.buffer == buffer]
            elif buffers[buffer].kind is BufferKind.WORKSPACE:
                known = [a for writer, a in written if a.buffer == buffer and writer == op]
            else:
                known = [_random_access(random, buffers, buffer)]
            reads += [random.choice(known)] if known else []
        writable = [b for b, record in enumerate(buffers) if record.kind is not BufferKind.CONSTANT]
        writes = [_random_access(random, buffers, random.choice(writable)) for _ in range(random.randint(0, 2))]
        written += [(op, access) for access in writes]
        after = random.randrange(index) if chained and index and random.random() < 0.1 else None
        tasks.append(kernel(tuple(reads), tuple(writes), op=op, programmatic_after=after))
    opaque = tuple(op for op in range(op_count) if chained and random.random() < 0.1)
    return graph(buffers, tasks, opaque=opaque)


def entangled_graph(random: Random) -> Graph:
    """Draw a graph of two buffers of a few bytes; tasks read and write parts of them, whether written or not."""
    buffers = temporaries(12, 12)

    def some() -> tuple[Access, ...]:
        return tuple(_random_access(random, buffers, random.randrange(2)) for _ in range(random.randint(0, 2)))

    return graph(buffers, [kernel(some(), some(), op=task) for task in range(random.randint(2, 9))])


def graphs(*, max_tasks: int = 12, chained: bool = True) -> st.SearchStrategy[Graph]:
    """Return a strategy for random graphs of at most ``max_tasks`` tasks."""
    randoms = st.randoms(use_true_random=False)
    return st.builds(random_graph, randoms, st.integers(0, max_tasks), chained=st.just(chained))


def entangled_graphs() -> st.SearchStrategy[Graph]:
    """Return a strategy for random graphs of two buffers of a few bytes."""
    return st.builds(entangled_graph, st.randoms(use_true_random=False))


def _random_access(random: Random, buffers: list[Buffer], buffer: int) -> Access:
    offset = random.randrange(buffers[buffer].nbytes)
    return access(buffer, offset, random.randint(0, buffers[buffer].nbytes - offset))


def schedules(dag: Dag, seed: int = 0) -> list[Schedule]:
    """Return one schedule of each policy, with durations that differ."""
    durations = [100 + 37 * task % 90 for task in range(dag.task_count)]
    return [
        serial(dag),
        maximal(dag),
        limited(dag, 2, durations),
        critical_path(dag, durations, 20, 3),
        random_schedule(dag, seed),
    ]
