"""Graphs that begin with their inputs: one launch brings these and runs the program.

An upload and a kernel that are enqueued one by one before the program's graph take the host longer than the
GPU, which waits for them. Callers mostly come again with inputs that lie as the last ones did.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nimblert import driver, graph
from nimblert.driver import Handle, call
from nimblert.errors import CudaError

_MOST_GRAPHS = 4
_MOST_SEEN = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """How an input comes in: by nodes that ``steps`` add to a graph, one after the other.

    What comes from the host is copied to ``staged`` before, an array over page-locked memory.
    """

    steps: Sequence[Callable[[Handle], Handle]]
    staged: np.ndarray | None = None

    def add(self, built: Handle) -> Handle:
        """Add it to a graph: its last node."""
        nodes = [step(built) for step in self.steps]
        for before, after in pairwise(nodes):
            graph.add_edge(built, before, after)
        return nodes[-1]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A graph, ready to be launched when each of ``staged`` is what its input shall be."""

    executable: Handle
    staged: Sequence[np.ndarray]


class ArrivingGraphs:
    """The graphs of a ``program``, itself a graph, for inputs that have come several times."""

    def __init__(self, program: Handle) -> None:
        self._program = program
        self._made: dict[Hashable, Arriving] = {}
        self._seen: dict[Hashable, int] = {}
        self._patience = 1

    def find(self, key: Hashable, enough: int, arrivals: Callable[[], Sequence[Arrival]]) -> Arriving | None:
        """That for inputs of this ``key``; None as long as they have not come ``enough`` times.

        Where callers have more kinds than are kept, or the driver refuses one, the next must come ever more
        often.
        """
        found = self._made.get(key)
        if found is not None:
            return found
        count = self._seen.get(key, 0) + 1
        if count < enough * self._patience:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = count
            return None
        self._seen.pop(key, None)
        if len(self._made) >= _MOST_GRAPHS:
            self._patience *= 4
            _destroy(self._made.pop(next(iter(self._made))))
        try:
            made = self._made[key] = _made(self._program, arrivals())
        except CudaError:  # without memory for it the call runs as the ones before; any other error ends that, too
            self._patience *= 4
            return None
        return made

    def close(self) -> None:
        """Give all of them back."""
        while self._made:
            _destroy(self._made.popitem()[1])


def _made(program: Handle, arrivals: Sequence[Arrival]) -> Arriving:
    built = call("cuGraphCreate", 0)
    try:
        before = [arrival.add(built) for arrival in arrivals]
        call("cuGraphAddChildGraphNode", built, before, len(before), program)
        staged = tuple(arrival.staged for arrival in arrivals if arrival.staged is not None)
        return Arriving(call("cuGraphInstantiate", built, 0), staged)
    finally:
        call("cuGraphDestroy", built)


def _destroy(made: Arriving) -> None:
    driver.bindings().cuGraphExecDestroy(made.executable)
