"""From scheduled graphs to a plan: each becomes a program, and what is equal in them is stored once."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from nimblec.base.installation import VERSION
from nimblec.base.ir import Buffer, BufferKind, Graph, KernelWork, Layout, Part
from nimblec.plan.lower import lower, state, weights
from nimblec.plan.refit_programs import refits
from nimblec.schedule.lifetimes import used_buffers
from nimblec.schedule.memory import WEIGHT_ALIGNMENT
from nimblert.plan import Device, Kernel, Module, Plan, Program, Target, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin that a plan records."""

    target: Target
    device: Device
    versions: tuple[tuple[str, str], ...]


def assemble(parts: Sequence[Part], provenance: Provenance) -> Plan:
    """Return the plan of one part or several, without golden records.

    Equal modules, kernels and constants of several parts are stored once; a state whose storage they
    share is one state, and what only one of them writes is state for all.
    """
    if len(parts) > 1 or parts[0].graph.bodies:
        parts = _sharing(parts)
    first = parts[0]
    bodies: list[Program] = []
    programs = [lower(p.graph, p.schedule, p.memory, name=p.name, bodies=bodies) for p in parts]
    return Plan(
        producer=f"nimblec {VERSION}",
        versions=provenance.versions,
        target=provenance.target,
        device=provenance.device,
        modules=first.graph.modules,
        kernels=first.graph.kernels,
        weights_nbytes=first.memory.weights_nbytes,
        weights=_united((part.name, weights(*scheduled)) for part in parts for scheduled in _nested(part)),
        state_nbytes=first.memory.state_nbytes,
        state=_united((part.name, state(part.graph, part.memory)) for part in parts),
        programs=tuple(
            replace(made, schedule=part.record, entry=part.entry, profile=part.profile)
            for made, part in zip(programs, parts, strict=True)
        ),
        refits=refits(parts),
        bodies=tuple(bodies),
    )


def _united(contents: Iterable[tuple[str, tuple[Weight, ...]]]) -> tuple[Weight, ...]:
    """Return the tensors of a region that the parts share, each once, by ascending offset; given by part with its name.

    Another tensor of a name that an earlier part has is called PART.NAME.
    """
    found: dict[int, Weight] = {}
    for part, tensors in contents:
        taken = {tensor.name for tensor in found.values()}
        for tensor in tensors:
            name = f"{part}.{tensor.name}" if tensor.name and tensor.name in taken else tensor.name
            found.setdefault(tensor.offset, replace(tensor, name=name))
    return tuple(found[offset] for offset in sorted(found))


def _sharing(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with the same modules and kernels, and the same regions of weights and of state."""
    sharing = _Sharing()
    graphs = _with_common_state([part.graph for part in parts])
    shared = [sharing.share(graph, part.memory) for graph, part in zip(graphs, parts, strict=True)]
    return [
        replace(part, graph=sharing.finished(graph), memory=sharing.sized(memory))
        for part, (graph, memory) in zip(parts, shared, strict=True)
    ]


def _nested(part: Part) -> Iterator[tuple[Graph, Layout]]:
    """Yield the graph of a part and those of all bodies in it, each with its memory layout."""
    waiting = [(part.graph, part.memory)]
    while waiting:
        graph, memory = waiting.pop()
        yield graph, memory
        waiting += [(body.graph, body.memory) for body in graph.bodies if body.memory is not None]


class _Sharing:
    """What several graphs and the bodies in them share: modules, kernels, and the regions of weights and of state."""

    def __init__(self) -> None:
        self._modules, self._kernels = _Modules(), _Kernels()
        self._rooms = {kind: _Room(kind) for kind in (BufferKind.CONSTANT, BufferKind.STATE)}

    def share(self, graph: Graph, memory: Layout) -> tuple[Graph, Layout]:
        """Return a graph with the numbers of all kernels and the places of all weights."""
        modules = self._modules.add(graph.modules)
        kernels = self._kernels.add(replace(kernel, module=modules[kernel.module]) for kernel in graph.kernels)
        placed = list(memory.offsets)
        for index in sorted(used_buffers(graph)):
            if room := self._rooms.get(graph.buffers[index].kind):
                placed[index] = room.place(graph.buffers[index])
        bodies = []
        for body in graph.bodies:
            assert body.memory is not None
            inner, inner_memory = self.share(body.graph, body.memory)
            bodies.append(replace(body, graph=inner, memory=inner_memory))
        tasks = [
            replace(task, work=replace(task.work, kernel=kernels[task.work.kernel]))
            if isinstance(task.work, KernelWork)
            else task
            for task in graph.tasks
        ]
        return replace(graph, tasks=tuple(tasks), bodies=tuple(bodies)), replace(memory, offsets=tuple(placed))

    def finished(self, graph: Graph) -> Graph:
        """Return a graph that was shared, with all modules and kernels."""
        return replace(graph, modules=tuple(self._modules.items), kernels=tuple(self._kernels.items))

    def sized(self, memory: Layout) -> Layout:
        """Return the memory of a graph that was shared, with the sizes of the regions of all."""
        weights, state = (self._rooms[kind].nbytes for kind in (BufferKind.CONSTANT, BufferKind.STATE))
        return replace(memory, weights_nbytes=weights, state_nbytes=state)


def _with_common_state(graphs: Sequence[Graph]) -> Iterator[Graph]:
    """Return the graphs with every buffer as state whose storage is state of any of them."""
    written = {b.storage for graph in graphs for b in graph.buffers if b.kind is BufferKind.STATE} - {0}

    def common(buffer: Buffer) -> Buffer:
        is_state = buffer.kind is BufferKind.CONSTANT and buffer.storage in written
        return replace(buffer, kind=BufferKind.STATE) if is_state else buffer

    return (replace(graph, buffers=tuple(map(common, graph.buffers))) for graph in graphs)


class _Modules:
    """The modules of several graphs, by origin and code."""

    def __init__(self) -> None:
        self.items: list[Module] = []
        self._known: dict[Hashable, int] = {}

    def add(self, modules: Iterable[Module]) -> list[int]:
        """Return the number of each of these modules."""
        numbers = []
        for module in modules:
            number = self._known.setdefault((module.origin, sha256(module.code).digest()), len(self.items))
            if number == len(self.items):
                self.items.append(module)
            numbers.append(number)
        return numbers


class _Kernels:
    """The kernels of several graphs. What attributes one function is given serves every launch of it."""

    def __init__(self) -> None:
        self.items: list[Kernel] = []
        self._known: dict[Hashable, int] = {}

    def add(self, kernels: Iterable[Kernel]) -> list[int]:
        """Return the number of each of these kernels, whose modules are numbered as all are."""
        numbers = []
        for kernel in kernels:
            number = self._known.setdefault((kernel.module, kernel.symbol, kernel.parameters), len(self.items))
            if number == len(self.items):
                self.items.append(kernel)
            known = self.items[number]
            self.items[number] = replace(
                known,
                max_dynamic_smem_nbytes=max(known.max_dynamic_smem_nbytes, kernel.max_dynamic_smem_nbytes),
                non_portable_cluster=known.non_portable_cluster or kernel.non_portable_cluster,
            )
            numbers.append(number)
        return numbers


_SAMPLED = 1024
"""Bytes of a constant that must equal another's before all of them are compared."""


class _Room:
    """The WEIGHTS or STATE region of several graphs: equal constants, and states of one storage, lie in one place."""

    def __init__(self, kind: BufferKind) -> None:
        self._kind = kind
        self.nbytes = 0
        self._offsets: dict[Hashable, int] = {}
        self._first: dict[Hashable, memoryview | bytes] = {}
        self._digests: dict[Hashable, bytes] = {}

    def place(self, buffer: Buffer) -> int:
        """Return the offset of a buffer."""
        key = self._key(buffer)
        if key not in self._offsets:
            alignment = max(WEIGHT_ALIGNMENT, buffer.alignment)
            self._offsets[key] = -(-self.nbytes // alignment) * alignment
            self.nbytes = self._offsets[key] + buffer.nbytes
        return self._offsets[key]

    def _key(self, buffer: Buffer) -> Hashable:
        if self._kind is BufferKind.STATE:
            return buffer.storage or object()
        data = b"" if buffer.data is None else buffer.data
        apart = buffer.name if buffer.is_replaceable else None
        # Gigabytes are hashed only where a few of their bytes are equal: each schedule that is timed is assembled.
        values = np.frombuffer(data, np.uint8)
        sample = values[:: len(values) // _SAMPLED + 1].tobytes()
        likeness = buffer.dtype, buffer.shape, buffer.alignment, apart, sample
        first = self._first.setdefault(likeness, data)
        if first is data:
            return likeness
        if likeness not in self._digests:
            self._digests[likeness] = sha256(first).digest()
        digest = sha256(data).digest()
        return likeness if digest == self._digests[likeness] else (likeness, digest)
