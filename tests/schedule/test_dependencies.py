"""What must keep its order does, and nothing else."""

from collections.abc import Iterator
from itertools import combinations, product

import networkx as nx
import pytest
from examples import examples
from graphs import access, dataflow, entangled_graphs, graph, graphs, kernel, temporaries
from hypothesis import given

from nimblec.base.ir import Access, Buffer, BufferKind, CopyWork, FillWork, Graph, KernelWork, Reference, Task
from nimblec.schedule.dag import Dag, ancestors, descendants, members, transitive_reduction
from nimblec.schedule.dependencies import (
    close_gaps,
    dependencies,
    programmatic_edges,
    rename_workspaces,
    with_programmatic_edges,
)


def conflicts(model: Graph) -> Iterator[tuple[int, int]]:
    """Yield every pair of tasks that must keep their order, by comparing all pairs."""
    for (before, early), (after, late) in combinations(enumerate(model.tasks), 2):
        pairs = *product(early.writes, (*late.reads, *late.writes)), *product(early.reads, late.writes)
        same_opaque_op = early.op == late.op and model.ops[late.op].opaque
        if same_opaque_op or any(_overlap(model, *pair) for pair in pairs):
            yield before, after


def _overlap(model: Graph, a: Access, b: Access) -> bool:
    is_shared = a.buffer == b.buffer and model.buffers[a.buffer].kind is not BufferKind.CONSTANT
    return is_shared and max(a.offset, b.offset) < min(a.offset + a.nbytes, b.offset + b.nbytes)


def closure_of_conflicts(model: Graph) -> tuple[int, ...]:
    """Return the tasks before each task, from the obvious definition."""
    pairs = list(conflicts(model))
    before = (tuple(early for early, late in pairs if late == task) for task in range(len(model.tasks)))
    return ancestors(Dag(predecessors=tuple(before)))


@given(graphs())
def test_every_conflicting_pair_is_ordered_and_no_other(model: Graph) -> None:
    dag = dependencies(model)
    assert set(dag.edges) <= set(conflicts(model))
    assert ancestors(dag) == closure_of_conflicts(model)


@examples(200)
@given(entangled_graphs())
def test_small_parts_match_all_pairs(model: Graph) -> None:
    order = closure_of_conflicts(model)
    assert ancestors(dependencies(model)) == order
    closed = close_gaps(model)
    assert ancestors(dependencies(closed)) == order
    assert close_gaps(closed) == closed


@given(graphs())
def test_reduction_keeps_the_paths_and_is_least(model: Graph) -> None:
    dag = dependencies(model)
    reduced = transitive_reduction(dag)
    reference = nx.DiGraph()
    reference.add_edges_from(dag.edges)
    assert set(reduced.edges) == set(nx.transitive_reduction(reference).edges)
    assert ancestors(reduced) == ancestors(dag)


@given(graphs())
def test_descendants_mirror_ancestors(model: Graph) -> None:
    dag = dependencies(model)
    pairs = {(before, after) for after, tasks in enumerate(ancestors(dag)) for before in members(tasks)}
    assert pairs == {(before, after) for before, tasks in enumerate(descendants(dag)) for after in members(tasks)}


def test_concatenated_slices_are_independent() -> None:
    model = graph(
        temporaries(128),
        [
            kernel((), (access(0, 0, 64),)),
            kernel((), (access(0, 64, 64),)),
            kernel((access(0, 0, 128),), ()),
            kernel((), (access(0, 32, 64),)),
        ],
    )
    assert dependencies(model).predecessors == ((), (), (0, 1), (0, 1, 2))


def test_only_the_latest_writer_of_each_byte_is_named() -> None:
    model = graph(
        temporaries(64), [kernel((), (access(0),)), kernel((access(0),), (access(0),)), kernel((access(0),), ())]
    )
    assert dependencies(model).predecessors == ((), (0,), (1,))


def test_readers_do_not_order_each_other() -> None:
    assert dependencies(dataflow((), (0,), (0,), (1, 2))).predecessors == ((), (0,), (0,), (1, 2))


@pytest.mark.parametrize(("kind", "expected"), [(BufferKind.CONSTANT, ()), (BufferKind.STATE, (0,))])
def test_constants_order_nothing(kind: BufferKind, expected: tuple[int, ...]) -> None:
    model = graph([Buffer(kind=kind, nbytes=64)], [kernel((access(0),), ()), kernel((), (access(0),))])
    assert dependencies(model).predecessors[1] == expected


def test_opaque_ops_keep_order() -> None:
    tasks = [kernel((), (), op=0), kernel((), (), op=1), kernel((), (), op=0), kernel((), (), op=1)]
    tasks.append(kernel((), (), op=0, programmatic_after=1))
    model = graph([], tasks, opaque=(0,))
    dag = dependencies(model)
    assert dag.predecessors == ((), (), (0,), (), (2,))
    assert programmatic_edges(model) == ((1, 4),)
    assert with_programmatic_edges(dag, model).predecessors == ((), (), (0,), (), (1, 2))


@given(graphs())
def test_closed_gaps_order_nothing_anew(model: Graph) -> None:
    closed = close_gaps(model)
    assert ancestors(dependencies(closed)) == ancestors(dependencies(model))
    assert close_gaps(closed) == closed
    for task, whole in zip(model.tasks, closed.tasks, strict=True):
        for pieces, accesses in ((task.reads, whole.reads), (task.writes, whole.writes)):
            assert {a.buffer for a in accesses} == {a.buffer for a in pieces}
            assert _bytes(pieces) <= _bytes(accesses)


def _bytes(accesses: tuple[Access, ...]) -> set[tuple[int, int]]:
    return {(a.buffer, byte) for a in accesses for byte in range(a.offset, a.offset + a.nbytes)}


def test_gaps_stay_where_another_branch_works_in_them() -> None:
    halves = [(access(0, 32 * n, 8), access(0, 64 + 32 * n, 8)) for n in (0, 1)]
    results = [tuple(access(0, a.offset + 8, 8) for a in half) for half in halves]
    first = kernel((), (*halves[0], *halves[1]))
    branches = [kernel(half, result) for half, result in zip(halves, results, strict=True)]
    reader = kernel((*results[0], *results[1]), (access(1),))
    assert close_gaps(graph(temporaries(128, 64), [first, *branches, reader])).tasks == (
        kernel((), (access(0, 0, 104),)),
        *branches,
        kernel((access(0, 8, 104),), (access(1),)),
    )


def test_gaps_of_a_chain_are_closed() -> None:
    chain = [
        kernel((), (access(0, 0, 8), access(0, 64, 8))),
        kernel((access(0, 0, 8), access(0, 64, 8)), (access(0, 8, 8), access(0, 72, 8))),
        kernel((access(0, 0, 16), access(0, 64, 16)), ()),
    ]
    assert [(t.reads, t.writes) for t in close_gaps(graph(temporaries(128), chain)).tasks] == [
        ((), (access(0, 0, 72),)),
        ((access(0, 0, 72),), (access(0, 8, 72),)),
        ((access(0, 0, 80),), ()),
    ]


def test_a_workspace_shared_by_two_ops_becomes_two() -> None:
    workspace = Buffer(kind=BufferKind.WORKSPACE, nbytes=64)
    first = kernel((), (access(0),), op=0)
    second = kernel((access(0),), (), op=0)
    reference = Reference(param_offset=8, buffer=0, offset=16)
    launch = KernelWork(kernel=0, params=b"", references=(reference,))
    other = Task(op=1, work=launch, reads=(), writes=(access(0),))
    copy = Task(op=1, work=CopyWork(dst=access(0), src=access(0)), reads=(access(0),), writes=(access(0),))
    fill = Task(op=2, work=FillWork(dst=access(0), value=0, element_nbytes=1), reads=(), writes=(access(0),))
    renamed = rename_workspaces(graph([workspace], [first, second, other, copy, fill]))
    assert renamed.buffers == (workspace,) * 3
    assert renamed.tasks[:2] == (first, second)
    assert renamed.tasks[2].writes == (access(1),)
    moved = Reference(param_offset=8, buffer=1, offset=16)
    assert renamed.tasks[2].work == KernelWork(kernel=0, params=b"", references=(moved,))
    assert renamed.tasks[3].work == CopyWork(dst=access(1), src=access(1))
    assert renamed.tasks[4].work == FillWork(dst=access(2), value=0, element_nbytes=1)
    assert dependencies(renamed).predecessors == ((), (0,), (), (2,), ())
    assert rename_workspaces(renamed) == renamed
