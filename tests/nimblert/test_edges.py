"""The edges of the graph are what streams and events say, no more and no less."""

from typing import Any

import pytest
from graphs import graphs, schedules
from hypothesis import given
from hypothesis import strategies as st
from programs import planned

from nimblec.base.ir import Graph
from nimblec.plan.lower import lower
from nimblec.schedule.dag import scheduled_ancestors, task_set
from nimblec.schedule.dependencies import dependencies, rename_workspaces
from nimblec.schedule.memory import layout
from nimblert.cuda import graph
from nimblert.cuda.graph import Edge, edges
from nimblert.plan import Command, Launch, Memset, Pointer, Record, Region, Wait


def launch(stream: int, *, programmatic: bool = False) -> Launch:
    return Launch(
        stream=stream, op=0, kernel=0, params=b"", relocations=(), reads=(), writes=(), programmatic=programmatic
    )


def fill(stream: int) -> Memset:
    dst = Pointer(region=Region.ARENA)
    return Memset(stream=stream, op=0, dst=dst, value=0, element_nbytes=1, count=1)


def record(stream: int, event: int) -> Record:
    return Record(stream=stream, event=event)


def wait(stream: int, event: int) -> Wait:
    return Wait(stream=stream, event=event)


EDGES: dict[str, tuple[tuple[Command, ...], list[list[int]]]] = {
    "a stream is a chain": ((launch(0), fill(0), launch(1), launch(0)), [[], [0], [], [1]]),
    "a wait is an edge from the work recorded": (
        (launch(0), record(0, 0), launch(0), wait(1, 0), fill(1), launch(1)),
        [[], [0], [0], [2]],
    ),
    "an event without work carries what its stream waits for": (
        (launch(0), record(0, 0), wait(1, 0), record(1, 1), wait(2, 1), launch(2), launch(1)),
        [[], [0], [0]],
    ),
    "an event of an empty stream orders nothing": ((record(0, 0), wait(1, 0), launch(1)), [[]]),
    "an event marks what was issued before it": (
        (launch(0), record(0, 0), launch(1), wait(0, 0), launch(0)),
        [[], [], [0]],
    ),
    "a wait for another event does not move it": (
        (launch(0), record(0, 0), launch(2), record(2, 1), wait(0, 1), wait(1, 0), launch(1)),
        [[], [], [0]],
    ),
    "equal edges are one": ((launch(0), record(0, 0), wait(0, 0), launch(0)), [[], [0]]),
    "implied edges are left out": (
        (launch(0), record(0, 0), wait(1, 0), launch(1), record(1, 1), wait(0, 1), wait(0, 0), launch(0)),
        [[], [0], [1]],
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_follow_streams_and_events(name: str) -> None:
    commands, expected = EDGES[name]
    assert [[edge.source for edge in row] for row in edges(commands)] == expected


def test_only_the_edge_along_the_stream_is_programmatic() -> None:
    commands = (launch(0), launch(1), record(1, 0), wait(0, 0), launch(0, programmatic=True))
    assert edges(commands)[2] == (Edge(source=0, programmatic=True), Edge(source=1))
    alone = (launch(1), record(1, 0), wait(0, 0), launch(0, programmatic=True))
    assert edges(alone)[1] == (Edge(source=0),)


def test_edges_join_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "add_command", lambda _graph, command, *_: graph.Nodes(command, command))
    monkeypatch.setattr(graph, "add_edges", lambda *_, **_options: None)
    memory: Any = None

    def ends(*commands: Command) -> tuple[list[int], list[int]]:
        """Their places among the work."""
        found = graph.add_program(None, planned(*commands), (), memory)
        nodes = [command for command in commands if not isinstance(command, Record | Wait)]
        first, last = ([next(n for n, each in enumerate(nodes) if each is node) for node in part] for part in found)
        return first, last

    early = [launch(0, programmatic=True) for _ in range(3)]
    assert ends(launch(0), *early) == ([0], [3])
    assert ends(launch(0), record(0, 0), *early[:1], wait(1, 0), fill(1), launch(2)) == ([0, 3], [1, 2, 3])
    assert ends(launch(1), record(1, 0), wait(0, 0), *early[:1]) == ([0], [1])
    assert ends() == ([], [])


@given(graphs(), st.integers(0, 1000))
def test_edges_of_a_lowered_schedule_order_what_it_orders(model: Graph, seed: int) -> None:
    model = rename_workspaces(model)
    for schedule in schedules(dependencies(model), seed):
        derived = edges(lower(model, schedule, layout(model, schedule)).commands)
        before: list[int] = []
        for row in derived:
            before.append(task_set(edge.source for edge in row))
            for edge in row:
                before[-1] |= before[edge.source]
        for place, task in enumerate(schedule.order):
            tasks = {schedule.order[source] for source in range(len(before)) if before[place] >> source & 1}
            assert task_set(tasks) == scheduled_ancestors(schedule)[task]
