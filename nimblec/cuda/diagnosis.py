"""Find the first op whose replay differs from the framework's own graph.

Every allocation of a capture has a unique address, so after a replay of the captured graph all
intermediate results are still there. The plan's kernels run on separate buffers, and the two memories
are compared in task order.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing

import numpy as np

from nimblec.base.ir import BufferKind, Graph, Layout, Part
from nimblec.cuda.capture.record import Recording
from nimblec.plan.assembly import Provenance, assemble
from nimblec.schedule.dependencies import dependencies
from nimblec.schedule.streams import serial
from nimblert import golden
from nimblert.cuda.backend import CudaLoaded
from nimblert.cuda.driver import call
from nimblert.plan import Device, Golden, Pointer, Region, Target

_ALIGNMENT = 512
_COMPARED = (BufferKind.TEMPORARY, BufferKind.OUTPUT)


def first_difference(recording: Recording, device: Device, inputs: Mapping[str, np.ndarray], expected: Golden) -> str:
    """Return a sentence that names the first op whose result differs from the captured graph's.

    ``inputs`` are by name, ``expected`` are the framework's results for them without capture. The sentence says
    instead if the captured graph itself gives other results, or if every single kernel agrees.
    """
    graph = recording.graph
    if graph.bodies:
        return "its captured graph runs each loop once, so the first op whose result differs is not known"
    recording.replay(inputs)
    if golden.record(expected.seed, recording.outputs(), 0.0).outputs != expected.outputs:
        return (
            "the captured graph itself computes something else: the model runs differently while it is traced "
            "(it asks for modes, hooks or the current stream)"
        )
    layout = separate(graph)
    provenance = Provenance(target=Target.CUDA, device=device, versions=())
    plan = assemble([Part(graph=graph, schedule=serial(dependencies(graph)), memory=layout)], provenance)
    program = plan.programs[0]
    with closing(CudaLoaded(plan, 0)) as loaded, closing(loaded.working(poison=True)) as working, closing(
        loaded.backend(program, working, poison=True)
    ) as backend:
        for tensor, view in zip(program.inputs, backend.inputs, strict=True):
            np.copyto(view, inputs[tensor.name])
        backend.run()
        for task, buffer, offset, nbytes in _last_writes(graph):
            pointer = _pointer(graph, layout, buffer, offset)
            captured = _read(recording.addresses[buffer] + offset, nbytes)
            found = _read(backend.memory.address(pointer), nbytes)
            if not np.array_equal(captured, found):
                op = graph.ops[graph.tasks[task].op]
                where = f" in {op.source}" if op.source else ""
                count = int(np.count_nonzero(captured != found))
                return f"the first op whose result differs is {op.name}{where} (task {task}, {count} of {nbytes} bytes)"
    return "each kernel alone computes what the framework's did: the order or the memory layout is wrong"


def separate(graph: Graph) -> Layout:
    """Return a layout in which no two buffers share bytes."""
    offsets = [0] * len(graph.buffers)
    ends = dict.fromkeys(Region, 0)
    regions = {BufferKind.CONSTANT: Region.WEIGHTS, BufferKind.STATE: Region.STATE}
    for number, buffer in enumerate(graph.buffers):
        if buffer.kind in (BufferKind.INPUT, BufferKind.OUTPUT):
            continue
        region = regions.get(buffer.kind, Region.ARENA)
        offsets[number] = ends[region]
        ends[region] += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(
        offsets=tuple(offsets),
        arena_nbytes=ends[Region.ARENA],
        weights_nbytes=ends[Region.WEIGHTS],
        state_nbytes=ends[Region.STATE],
    )


def _last_writes(graph: Graph) -> Iterator[tuple[int, int, int, int]]:
    """Yield (task, buffer, offset, nbytes) of the last write of each tensor, or piece of one, in task order."""
    last = {(a.buffer, a.offset): (t, a) for t, task in enumerate(graph.tasks) for a in task.writes}
    for task, access in sorted(last.values(), key=lambda item: item[0]):
        if graph.buffers[access.buffer].kind in _COMPARED:
            yield task, access.buffer, access.offset, access.nbytes


def _pointer(graph: Graph, layout: Layout, buffer: int, offset: int) -> Pointer:
    if graph.buffers[buffer].kind is BufferKind.OUTPUT:
        outputs = [n for n, b in enumerate(graph.buffers) if b.kind is BufferKind.OUTPUT]
        return Pointer(region=Region.OUTPUT, index=outputs.index(buffer), offset=offset)
    return Pointer(region=Region.ARENA, offset=layout.offsets[buffer] + offset)


def _read(address: int, nbytes: int) -> np.ndarray:
    host = np.empty(nbytes, np.uint8)
    call("cuMemcpyDtoH", host.ctypes.data, address, nbytes)
    return host
