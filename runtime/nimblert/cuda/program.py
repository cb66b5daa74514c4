"""A program as an instantiated CUDA graph, and the order of its runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.graph import Step
from nimblert.cuda.memory import DeviceMemory
from nimblert.cuda.movers import GatherKernels
from nimblert.cuda.uploader import Uploader
from nimblert.cuda.working import CudaWorking
from nimblert.plan import Crop, Program, Work, pieces
from nimblert.plan.dimensions import Shape
from nimblert.stages import stage

if TYPE_CHECKING:
    from nimblert.cuda.control import Control
    from nimblert.cuda.crops import Crops


class GraphProgram:
    """The graph of a program over ``memory``. ``bound`` are the names of inputs and outputs in memory of the caller."""

    kernels: GatherKernels
    uploader: Uploader

    def __init__(
        self,
        program: Program,
        context: Context,
        functions: Sequence[Handle],
        memory: DeviceMemory,
        working: CudaWorking,
        device: int,
        bodies: Sequence[Program] = (),
    ) -> None:
        self.program, self.memory, self.in_flight = program, memory, working.in_flight
        self.bound: frozenset[str] = frozenset()
        self.device = device
        self._context, self._functions, self._stream = context, functions, working.stream
        self.launch: Callable[[Handle, int], None] = driver.function("cuGraphLaunch")
        """Enqueue a graph on a stream."""
        self.synchronize_stream: Callable[[int], None] = driver.function("cuStreamSynchronize")
        self._control: Control | None = None
        if any(pieces.bodies_of(command) for _, command in program.work):
            from nimblert.cuda import control  # few plans have loops

            self._control = control.Control(program, bodies, context)
            self.synchronize_stream = self._control.checked(self.synchronize_stream)
        self.crops: Crops | None = None
        if any(isinstance(command, Crop) for _, command in program.work):
            from nimblert.cuda import crops  # few outputs are cropped

            self.crops = crops.Crops(program, context, self.kernels)
        with stage("build the graph"):
            self._graph = self.instantiate(memory)
        with stage("upload the graph"):
            call("cuGraphUpload", self._graph, self._stream)
            self.synchronize_stream(self._stream)

    def instantiate(
        self,
        memory: DeviceMemory,
        arrivals: Sequence[Sequence[Step]] = (),
        departures: Sequence[Step] = (),
        beside: Sequence[Step] = (),
    ) -> Handle:
        """Return the executable graph of the program over ``memory``. Raises CudaError.

        Each of ``arrivals`` has steps that follow each other, before the program; ``departures`` come after it, and
        steps ``beside`` run concurrently. The nodes of the program lie in the graph itself, so that they run as they do
        in the graph of a replay; a child graph may run otherwise.
        """

        def add(built: Handle) -> None:
            before = []
            for steps in arrivals:
                nodes = [step(built) for step in steps]
                for earlier, later in pairwise(nodes):
                    graph.add_edges(built, [earlier], [later])
                before += nodes[-1:]
            ends = graph.add_program(built, self.program, self._functions, memory, self._control, self.crops)
            graph.add_edges(built, before, ends.first)
            for step in beside:
                step(built)
            graph.add_edges(built, ends.last or before, [step(built) for step in departures])

        return graph.instantiated(add)

    def add_command(self, built: Handle, command: Work) -> graph.Nodes:
        """Add a command alone to a graph, and return its nodes."""
        return graph.add_command(built, command, self._functions, self.memory, self._control, self.crops)

    @property
    def sizes(self) -> Mapping[str, Shape]:
        """The sizes that the last run, which has ended, gave to outputs that it cropped, by name. Raises InputError."""
        return {} if self.crops is None else self.crops.sizes()

    def begin(self, stream: int | None) -> int:
        """Make later work on ``stream``, by default the context's, follow all work in flight; return its handle."""
        used = self._stream if stream is None else stream
        self._context.make_current()
        if self.in_flight.stream is not None:
            self.in_flight.precede(used)
        return used

    def launch_program(self, stream: int) -> None:
        """Enqueue the graph of the program alone."""
        self.launch(self._graph, stream)

    def end(self, stream: int | None, kept: object = None) -> None:
        """Wait for the work of a call; with a ``stream`` of the caller, track it instead, and keep ``kept`` alive."""
        if stream is not None:
            self.in_flight.enqueued(stream, kept)
            return
        self.synchronize_stream(self._stream)
        if self.in_flight.stream is not None:
            self.in_flight.ended()
