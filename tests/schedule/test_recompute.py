"""Tasks that run again instead of keeping what they gave: the same values in less memory."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from graphs import access, graph, kernel, schedules, temporaries

from nimblec.base.ir import Buffer, BufferKind, Graph, KernelWork, Reference, Task, TensorView
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.recompute import _Analysis, recomputed

KEPT = (BufferKind.OUTPUT, BufferKind.STATE)


def peak_nbytes(made: Graph) -> int:
    """Return the most bytes of the arena that are kept at a time in the captured order."""
    return int(_Analysis(made, {}).live.max(initial=0))


def tagged(made: Graph) -> Graph:
    """Return a graph whose tasks differ from one another, though not from their clones; nothing is aligned."""
    tasks = tuple(replace(task, duration_ns=1 + n) for n, task in enumerate(made.tasks))
    return replace(made, tasks=tasks, buffers=tuple(replace(buffer, alignment=1) for buffer in made.buffers))


def run(made: Graph, order: Iterable[int]) -> tuple[dict[int, set[Hashable]], list[list[Hashable]]]:
    """Return what each task writes, and what outputs and states hold in the end; a value says how it was made."""
    memory: list[list[Hashable]] = [[(n, at) for at in range(b.nbytes)] for n, b in enumerate(made.buffers)]
    written: defaultdict[int, set[Hashable]] = defaultdict(set)
    for index in order:
        task = made.tasks[index]
        found = tuple(tuple(memory[r.buffer][r.offset : r.offset + r.nbytes]) for r in task.reads)
        for n, write in enumerate(task.writes):
            value, end = hash((task.duration_ns, n, found)), write.offset + write.nbytes
            memory[write.buffer][write.offset : end] = [(value, at) for at in range(write.nbytes)]
        written[task.duration_ns].add(found)
    views = [view.buffer for view in made.outputs]
    return dict(written), [memory[n] for n, b in enumerate(made.buffers) if b.kind in KEPT or n in views]


def random_step(seed: int) -> Graph:
    """Return a graph of which much is read late; what it reads of the arena has been written, or is an input."""
    rng = np.random.default_rng(seed)
    rest = [BufferKind.CONSTANT, BufferKind.INPUT, *KEPT, BufferKind.WORKSPACE]
    buffers = [Buffer(kind=kind, nbytes=4) for kind in rest] + temporaries(4)
    constant, entering, output, state, workspace, arriving = range(len(buffers))
    known = [constant, entering, state, arriving]
    tasks: list[Task] = []
    for index in range(rng.integers(8, 28)):
        reads = [known[n] for n in rng.choice(len(known), min(len(known), rng.integers(1, 4)), replace=False)]
        starts_half, ends_half = rng.random() < 0.2, bool(tasks) and bool(tasks[-1].writes[-1].buffer == workspace)
        writes = [len(buffers)] * (rng.random() < 0.8)
        buffers += temporaries(int(rng.choice([1, 8, 40])))[: len(writes)]
        if rng.random() < 0.3 or not writes:  # in place, where it may be read again later
            old = known[rng.integers(2, len(known))]
            writes.append(old)
            reads += [old] if rng.random() < 0.5 and old not in reads else []
        writes += [output] if rng.random() < 0.1 else []
        reads += [workspace] if ends_half else []
        whole = {b: int(rng.integers(buffers[b].nbytes)) if b in known and rng.random() < 0.3 else 0 for b in writes}
        read = tuple(access(b, 0, buffers[b].nbytes) for b in reads)
        written = [access(b, at, buffers[b].nbytes - at) for b, at in whole.items()]
        written += [access(workspace, 0, 4)] if starts_half and not ends_half else []
        after = int(rng.integers(index)) if index and rng.random() < 0.2 else None
        op = tasks[-1].op if ends_half else index
        tasks.append(kernel(read, tuple(written), op=op, programmatic_after=after))
        known += [b for b in writes if b not in known and b != output]
    leaving = known[-1]
    into, out = (
        TensorView(name="", dtype="uint8", shape=(1,), strides=(1,), buffer=buffer) for buffer in (arriving, leaving)
    )
    return tagged(graph(buffers, tasks, inputs=(into,), outputs=(out,)))


SEEDS = 400


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_task_computes_what_it_did_under_any_schedule(seed: int) -> None:
    made = random_step(seed)
    smaller = recomputed(made, seed % 7 * 10)
    assert run(smaller, range(len(smaller.tasks))) == run(made, range(len(made.tasks)))
    tags = [task.duration_ns for task in smaller.tasks]
    assert list(dict.fromkeys(tags)) == [task.duration_ns for task in made.tasks]
    for index, task in enumerate(smaller.tasks):
        first, before = made.tasks[tags[index] - 1], task.programmatic_after
        assert before is None or (before < index and tags[before] - 1 == first.programmatic_after)
        assert before is not None or first.programmatic_after is None or tags.index(tags[index]) != index
    for schedule in schedules(dependencies(smaller), seed):
        assert run(smaller, schedule.order) == run(made, range(len(made.tasks)))


def test_many_of_these_keep_less() -> None:
    made = [random_step(seed) for seed in range(SEEDS // 4)]
    smaller = [recomputed(each, 0) for each in made]
    assert sum(len(after.tasks) > len(before.tasks) for before, after in zip(made, smaller, strict=True)) > 15
    assert sum(peak_nbytes(after) < peak_nbytes(before) for before, after in zip(made, smaller, strict=True)) > 10


def chain(length: int, *, sizes: int = 100) -> Graph:
    """Return a step of training: each layer reads the one before, and its gradient reads what the layer gave."""
    forward = [kernel(((access(n - 1, 0, sizes),) if n else ()), (access(n, 0, sizes),), op=n) for n in range(length)]
    backward = []
    for n in reversed(range(length)):
        gradient, before = 2 * length - 1 - n, 2 * length - 2 - n
        reads = (access(n, 0, sizes), *((access(before, 0, sizes),) if n < length - 1 else ()))
        backward.append(kernel(reads, (access(gradient, 0, sizes),), op=gradient))
    last = 2 * length
    tasks = [*forward, *backward, kernel((access(last - 1, 0, sizes),), (access(last, 0, sizes),), op=last)]
    buffers = [*temporaries(*[sizes] * last), Buffer(kind=BufferKind.OUTPUT, nbytes=sizes)]
    return tagged(graph(buffers, tasks))


@pytest.mark.parametrize("length", [8, 16])
def test_a_deep_network_takes_a_fraction_of_the_memory(length: int) -> None:
    made = chain(length)
    assert peak_nbytes(made) == (length + 1) * 100
    smaller = recomputed(made, length // 2 * 100 + 200)
    assert peak_nbytes(smaller) <= length // 2 * 100 + 200
    assert len(smaller.tasks) <= 2 * len(made.tasks)
    assert run(smaller, range(len(smaller.tasks))) == run(made, range(len(made.tasks)))


def test_a_limit_that_suffices_changes_nothing() -> None:
    made = chain(8)
    assert recomputed(made, peak_nbytes(made)) is made


def kept_for_long(first: Task, *between: Task) -> Graph:
    """Return a graph whose last task reads what ``first`` wrote, after a buffer of 1,000 bytes of its own."""
    tasks = (
        first,
        *between,
        kernel((), (access(1, 0, 1000),), op=4),
        kernel((access(1, 0, 1000),), (access(2, 0, 8),), op=5),
        kernel((access(0, 0, 1000), access(2, 0, 8)), (access(3, 0, 8),), op=6),
    )
    others = [Buffer(kind=kind, nbytes=1000) for kind in (BufferKind.OUTPUT, BufferKind.STATE, BufferKind.INPUT)]
    return tagged(graph([*temporaries(1000, 1000, 8), *others], list(tasks)))


def test_what_reads_an_input_runs_again() -> None:
    made = kept_for_long(kernel((access(5),), (access(0, 0, 1000),)))
    assert peak_nbytes(made) == 2000 + 8
    smaller = recomputed(made, 1100)
    assert peak_nbytes(smaller) <= 1100
    assert len(smaller.tasks) == len(made.tasks) + 1


@pytest.mark.parametrize(("source_nbytes", "read_again", "runs"), [(8, False, 1), (900, True, 1), (900, False, 2)])
def test_recompute_leaves_small_source(source_nbytes: int, read_again: bool, runs: int) -> None:
    source = Buffer(kind=BufferKind.TEMPORARY, nbytes=source_nbytes)
    made = kept_for_long(kernel((), ()))
    first = kernel((access(5),), (access(6, 0, source_nbytes),))
    second = kernel((access(6, 0, source_nbytes),), (access(0, 0, 1000),), op=1)
    *rest, last = made.tasks[1:]
    last = replace(last, reads=(*last.reads, *[access(6, 0, source_nbytes)] * read_again))
    made = tagged(replace(made, buffers=(*made.buffers, source), tasks=(first, second, *rest, last)))
    assert len(recomputed(made, 1950).tasks) - len(made.tasks) == runs


def test_a_kernel_that_runs_again_has_its_own_scratch_memory() -> None:
    made = kept_for_long(kernel((access(5),), (access(0, 0, 1000),)))
    pointers = (Reference(param_offset=0, buffer=5, offset=0), Reference(param_offset=8, buffer=6, offset=0))
    pointers += (Reference(param_offset=16, buffer=0, offset=16),)
    first, *rest = made.tasks
    first = replace(first, work=KernelWork(kernel=0, params=bytes(24), references=pointers))
    scratch = Buffer(kind=BufferKind.WORKSPACE, nbytes=100, alignment=1)
    smaller = recomputed(replace(made, buffers=(*made.buffers, scratch), tasks=(first, *rest)), 1200)
    again, last = smaller.tasks[-2:]
    assert isinstance(again.work, KernelWork)
    source, workspace, target = again.work.references
    assert (source.buffer, target.offset, target.buffer) == (5, 16, again.writes[0].buffer)
    assert smaller.buffers[workspace.buffer] == scratch
    assert workspace.buffer != 6 != target.buffer == last.reads[0].buffer


def test_what_an_input_brought_is_kept() -> None:
    """Of its buffer a task has written a part alone."""
    made = kept_for_long(kernel((access(5),), (access(0, 0, 500),)))
    view = TensorView(name="x", dtype="uint8", shape=(1000,), strides=(1,), buffer=0)
    made = replace(made, inputs=(view,))
    assert recomputed(made, 1100) is made


@pytest.mark.parametrize(
    "made",
    [
        kept_for_long(kernel((access(4),), (access(0, 0, 1000),)), kernel((), (access(4, 0, 1),), op=1)),
        kept_for_long(kernel((access(5),), (access(0, 0, 1000), access(4, 0, 8)))),
        kept_for_long(kernel((access(5),), (access(0, 0, 1000), access(3, 0, 8)))),
        replace(
            kept_for_long(kernel((access(5),), (access(0, 0, 1000),))),
            ops=tuple(replace(op, opaque=True) for op in kept_for_long(kernel((), ())).ops),
        ),
    ],
    ids=["its state has changed", "it writes state", "it writes an output", "what it writes is not known"],
)
def test_what_would_be_another_value_or_write_twice_is_kept(made: Graph) -> None:
    assert recomputed(made, 1100) is made
