"""From streams and events to the edges of a graph: the one place where order is derived."""

from collections.abc import Iterable
from dataclasses import dataclass

from nimblert.plan import Command, Launch, Record, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What ends before a command starts: ``source`` counts work commands in issue order.

    ``programmatic``: the command may start before ``source`` has ended, and waits for it itself.
    """

    source: int
    programmatic: bool = False


def edges(commands: Iterable[Command]) -> tuple[tuple[Edge, ...], ...]:
    """Return, for each work command (launch, memcpy, memset) in issue order, what it depends on.

    It depends on the work before it on its stream and on what it waits for; an edge that the others
    imply is left out. Edges are in ascending order of source. The commands must be those of a
    verified program: every wait follows the record of its event.
    """
    frontier: dict[int, set[int]] = {}  # by stream: what the next command on it follows
    last: dict[int, int] = {}
    events: dict[int, set[int]] = {}
    before: list[int] = []  # by work: the set of all works before it, as bits
    result = []
    for command in commands:
        stream = command.stream
        match command:
            case Record(event=event):
                events[event] = frontier.get(stream, set())
            case Wait(event=event):
                frontier[stream] = frontier.get(stream, set()) | events[event]
            case _:
                sources, implied = _reduced(frontier.get(stream, set()), before)
                early = isinstance(command, Launch) and command.programmatic
                result.append(tuple(Edge(source=s, programmatic=early and s == last.get(stream)) for s in sources))
                last[stream] = len(before)
                frontier[stream] = {len(before)}
                before.append(implied)
    return tuple(result)


def _reduced(sources: set[int], before: list[int]) -> tuple[list[int], int]:
    """Return the sources that no other source implies, ascending, and the set of all works implied."""
    implied = 0
    kept = []
    for source in sorted(sources, reverse=True):  # a source is implied only by a later one
        if not implied >> source & 1:
            kept.append(source)
            implied |= before[source] | 1 << source
    kept.reverse()
    return kept, implied
