"""Run a loaded program command by command, and time its commands or replays on the GPU."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np

from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, call, release
from nimblert.cuda.program import GraphProgram
from nimblert.plan import Work


def steps(backend: GraphProgram) -> Generator[Work, None, None]:
    """Compute on the inputs on the device in issue order, and yield each command but events when it is done.

    Each is a graph of its own, so that it runs as it does in the whole graph.
    """
    for _, command in backend.program.work:
        _run_once(backend, partial(backend.add_command, command=command))
        yield command


def command_times(backend: GraphProgram) -> list[int]:
    """Compute as `steps` does, and return the GPU nanoseconds of each launch, copy or fill.

    They are taken by events before and after the node, in the same graph, and include the time of the events.
    """
    with _two_events(backend) as (begin, end):
        return [_time_alone(backend, command, begin, end) for _, command in backend.program.work]


def replay_times(backend: GraphProgram, count: int) -> np.ndarray:
    """Return the GPU time in microseconds of each of ``count`` replays, between two events."""
    stream = backend.begin(None)
    times = np.empty(count)
    with _two_events(backend) as (begin, end):
        for i in range(count):
            call("cuEventRecord", begin, stream)
            backend.launch_program(stream)
            call("cuEventRecord", end, stream)
            call("cuEventSynchronize", end)
            times[i] = call("cuEventElapsedTime", begin, end) * 1e3
    return times


@contextmanager
def _two_events(backend: GraphProgram) -> Iterator[tuple[Handle, Handle]]:
    with closing(Context(backend.device)) as context:
        begin, end = (context.acquire(call("cuEventCreate", 0), "cuEventDestroy") for _ in range(2))
        yield begin, end


def _time_alone(backend: GraphProgram, command: Work, begin: Handle, end: Handle) -> int:
    def add(single: Handle) -> None:
        first = graph.add_record(single, begin)
        nodes = backend.add_command(single, command)
        graph.add_edges(single, [first], [nodes.first])
        graph.add_edges(single, [nodes.last], [graph.add_record(single, end)])

    _run_once(backend, add)
    return round(float(call("cuEventElapsedTime", begin, end)) * 1e6)


def _run_once(backend: GraphProgram, add: Callable[[Handle], object]) -> None:
    """Run the graph of the nodes that ``add`` adds, and wait."""
    stream = backend.begin(None)  # the caller may have had another CUDA context since
    executable = graph.instantiated(add)
    with ExitStack() as stack:
        stack.callback(release, "cuGraphExecDestroy", executable)
        stack.callback(backend.end, None)
        backend.launch(executable, stream)
