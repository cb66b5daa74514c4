"""Estimates of times on a nominal machine: what is chosen by them is the same on every machine, at any load."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from nimblec.base.ir import Graph, KernelWork, Schedule, Task
from nimblert.cpu.streams import is_large
from nimblert.plan import ITEM_NBYTES, Kernel, ParameterKind, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A nominal machine of ``lanes``: threads of a CPU, which streams divide, or multiprocessors of a GPU.

    A command takes ``launch_ns`` beside its work, and a wait of one stream for another ``edge_ns``. The rates are those
    of one lane.
    """

    lanes: int
    max_streams: int
    launch_ns: int
    edge_ns: int
    nbytes_per_ns: int
    flops_per_ns: int


MACHINES = {
    Target.CPU: Machine(lanes=4, max_streams=4, launch_ns=2_000, edge_ns=20_000, nbytes_per_ns=10, flops_per_ns=100),
    Target.CUDA: Machine(lanes=128, max_streams=16, launch_ns=2_000, edge_ns=1_000, nbytes_per_ns=16, flops_per_ns=500),
}

_THREADS_PER_LANE = 2048
"""Threads that one multiprocessor of a GPU runs at the same time."""

_RECURRENT = frozenset({"RNN", "GRU", "LSTM", "DynamicQuantizeLSTM"})


def command_ns(graph: Graph, target: Target) -> list[int]:
    """Return the nanoseconds of each task by itself."""
    return _durations(graph, target, MACHINES[target].lanes)


def run_ns(graph: Graph, schedule: Schedule, target: Target) -> int:
    """Return the nanoseconds of a run: those of `simulate`, or of all work on all lanes if that takes longer."""
    machine = MACHINES[target]
    count = max(1, schedule.stream_count)
    lanes = max(1, machine.lanes // count) if target is Target.CPU else machine.lanes
    simulated = simulate(schedule, _durations(graph, target, lanes), machine.edge_ns)
    work = sum(_work_ns(graph, task, machine) for task in graph.tasks) // machine.lanes
    # The first task of another stream waits for the run to begin, and the run's end for its last one.
    return max(simulated, work) + (machine.edge_ns if count > 1 else 0)


def simulate(schedule: Schedule, durations: Sequence[int], edge_ns: int = 0) -> int:
    """Return the nanoseconds from the start of the first task to the end of the last one.

    A task starts when the task before it on its stream has ended, and ``edge_ns`` after every task that it waits for
    has. Tasks of different streams do not slow each other down.
    """
    waits: dict[int, list[int]] = {}
    for before, after in schedule.waits:
        waits.setdefault(after, []).append(before)
    end: dict[int, int] = {}
    stream_end: dict[int, int] = {}
    for task in schedule.order:
        stream = schedule.streams[task]
        start = max([stream_end.get(stream, 0), *(end[before] + edge_ns for before in waits.get(task, ()))])
        end[task] = stream_end[stream] = start + durations[task]
    return max(end.values(), default=0)


def _durations(graph: Graph, target: Target, lanes: int) -> list[int]:
    """Return the nanoseconds of each task on as many of these ``lanes`` as it can use."""
    machine = MACHINES[target]
    return [
        machine.launch_ns + _work_ns(graph, task, machine) // min(lanes, _width(graph, task, target))
        for task in graph.tasks
    ]


def _work_ns(graph: Graph, task: Task, machine: Machine) -> int:
    """Return the nanoseconds of a task's work on one lane, from the bytes that it touches and its arithmetic."""
    nbytes = sum(access.nbytes for access in (*task.reads, *task.writes))
    flops = _flops(graph.kernels[task.work.kernel]) if isinstance(task.work, KernelWork) else 0
    return max(nbytes // machine.nbytes_per_ns, flops // machine.flops_per_ns)


def _width(graph: Graph, task: Task, target: Target) -> int:
    """Return how many lanes a task can use."""
    lanes = MACHINES[target].lanes
    if target is Target.CPU:
        is_wide = isinstance(task.work, KernelWork) and _is_large(graph.kernels[task.work.kernel])
        return lanes if is_wide else 1
    if isinstance(task.work, KernelWork):
        return min(lanes, -(-prod(task.work.grid) * prod(task.work.block) // _THREADS_PER_LANE))
    return lanes


def _is_large(kernel: Kernel) -> bool:
    """Return whether several threads run a kernel of a CPU plan faster."""
    return is_large(sum(prod(p.shape) * ITEM_NBYTES[p.dtype] for p in kernel.parameters))


def _flops(kernel: Kernel) -> int:
    """Return the operations of a convolution, matrix product or recurrent layer of a CPU plan; 0 for other kernels."""
    operator = kernel.symbol.rpartition(".")[2]
    reads = [p.shape for p in kernel.parameters if p.kind in {ParameterKind.INPUT, ParameterKind.INITIALIZER}]
    writes = [p.shape for p in kernel.parameters if p.kind is ParameterKind.OUTPUT]
    if len(reads) < 2 or not (writes and reads[0] and reads[1]):
        return 0
    if operator in _RECURRENT:
        return 2 * prod(reads[0][:-1]) * sum(map(prod, reads[1:3]))
    if "ConvTranspose" in operator:
        return 2 * prod(reads[0]) * prod(reads[1][1:])
    if "Conv" in operator:
        return 2 * prod(writes[0]) * prod(reads[1][1:])
    if "MatMul" in operator or "Gemm" in operator:
        return 2 * prod(writes[0]) * reads[0][-1]
    return 0
