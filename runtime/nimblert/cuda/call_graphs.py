"""Graphs of whole calls: one launch transfers the inputs, runs the program and transfers the outputs.

To enqueue copies and kernels one by one around the program's graph takes the host longer than the GPU, which waits.
Most callers repeat calls with inputs of the same layout, and release outputs, whose memory is then reused.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Handle
from nimblert.cuda.early import StagedArrays
from nimblert.cuda.graph import Step
from nimblert.errors import CudaError

_MOST_GRAPHS = 4
_MOST_SEEN = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """The transfer of an input: ``steps``, one after the other."""

    steps: Sequence[Step]

    def add(self, built: Handle) -> Handle:
        """Add it to a graph, and return its last node."""
        nodes = [step(built) for step in self.steps]
        for before, after in pairwise(nodes):
            graph.add_edges(built, [before], [after])
        return nodes[-1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts of the graph of a call: ``arrivals``, then what ``program`` adds, then ``departures``.

    Steps ``beside`` run concurrently, and only the end of the call waits for them. The nodes of the program lie in the
    graph itself, so that they run as they do in the graph of a replay; a child graph may run otherwise.
    """

    program: Callable[[Handle], graph.Ends]
    arrivals: Sequence[Arrival] = ()
    departures: Sequence[Step] = ()
    beside: Sequence[Step] = ()

    def instantiated(self) -> Handle:
        """The executable graph. Raises CudaError."""
        return graph.instantiated(self._add)

    def _add(self, built: Handle) -> None:
        before = [arrival.add(built) for arrival in self.arrivals]
        ends = self.program(built)
        graph.add_edges(built, before, ends.first)
        for step in self.beside:
            step(built)
        after = [step(built) for step in self.departures]
        graph.add_edges(built, ends.last or before, after)


@dataclass(frozen=True, slots=True)
class CallGraph:
    """A graph, and where it finds inputs of the host."""

    executable: Handle
    staged: StagedArrays = field(default_factory=StagedArrays)


class CallGraphs(dict[Hashable, CallGraph]):
    """Graphs of calls that were made several times, by key."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[Hashable, int] = {}
        self._patience = 1

    def missed(self, key: Hashable, enough: int, make: Callable[..., CallGraph], *args: object) -> CallGraph | None:
        """Count a call with this ``key``, which has no graph: the one that ``make`` makes of ``args`` after ``enough``.

        Where callers use more keys than are kept, or the driver refuses a graph, later graphs take ever more calls.
        """
        count = self._seen.get(key, 0) + 1
        if count < enough * self._patience:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = count
            return None
        self._seen.pop(key, None)
        if len(self) >= _MOST_GRAPHS:
            self._patience *= 4
            _destroy(self.pop(next(iter(self))))
        try:
            made = self[key] = make(*args)
        except CudaError:  # without memory for it the call runs as before; after any other error it fails
            self._patience *= 4
            return None
        return made

    def close(self) -> None:
        """Free all graphs."""
        while self:
            _destroy(self.popitem()[1])


def _destroy(made: CallGraph) -> None:
    driver.bindings().cuGraphExecDestroy(made.executable)
