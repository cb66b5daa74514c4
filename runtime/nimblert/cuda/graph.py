"""Rebuild the CUDA graph of a program: relocate the parameters, add the nodes and their edges."""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from nimblert.cuda.driver import Context, Handle, PackedParameters, SeparateParameters, bindings, call, release
from nimblert.cuda.memory import DeviceMemory
from nimblert.plan import (
    Command,
    Crop,
    Dim3,
    Kernel,
    Launch,
    Memcpy,
    Memset,
    Module,
    Program,
    Record,
    Switch,
    Wait,
    While,
    Work,
)
from nimblert.stages import stage

_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC

Step: TypeAlias = Callable[[Handle], Handle]
"""Adds a node to a graph, without edges, and returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What ends before a command starts: ``source`` counts work commands in issue order.

    ``programmatic``: the command may start before ``source`` has ended, and waits for it itself.
    """

    source: int
    programmatic: bool = False


class Rows(NamedTuple):
    """The rows of a 2D copy, in bytes but for ``height``, their number."""

    width: int
    height: int
    to_pitch: int
    source_pitch: int


class Filling(NamedTuple):
    """Rows of elements of ``itemsize`` bytes, at most 4, that hold ``value``; ``pitch`` is in bytes."""

    value: int
    itemsize: int
    width: int
    height: int = 1
    pitch: int = 0


class Ends(NamedTuple):
    """The nodes of a program that follow no other of it, and those that no other follows.

    Once the last have ended, all have: a kernel that starts early ends after the one before it (see `edges`).
    """

    first: Sequence[Handle]
    last: Sequence[Handle]


class Nodes(NamedTuple):
    """The first node of a command, which follows earlier commands, and its last, which later ones follow."""

    first: Handle
    last: Handle


class Control(Protocol):
    """Adds loops and branches to graphs (`nimblert.cuda.control`)."""

    def add(
        self, built: Handle, command: While | Switch, functions: Sequence[Handle], memory: DeviceMemory
    ) -> Nodes:
        """Add a loop or branch to a graph, without edges to other commands, and return its nodes."""


class Crops(Protocol):
    """Adds crops to graphs (`nimblert.cuda.crops`)."""

    def add(self, built: Handle, crop: Crop, memory: DeviceMemory) -> Handle:
        """Add a crop to a graph, without edges, and return its node."""


@stage("load the code")
def load_functions(context: Context, modules: Sequence[Module], kernels: Sequence[Kernel]) -> list[Handle]:
    """Load the cubins, set the attributes of their kernels, and return a CUfunction for each kernel.

    The driver loads lazily: the code of the modules must stay in place as long as the context.
    """
    attribute = bindings().CUfunction_attribute
    images = [np.frombuffer(m.code, np.uint8).ctypes.data for m in modules]
    handles = [context.acquire(call("cuModuleLoadData", image), "cuModuleUnload") for image in images]
    functions = []
    for kernel in kernels:
        function = call("cuModuleGetFunction", handles[kernel.module], kernel.symbol.encode())
        if kernel.max_dynamic_smem_nbytes:
            name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, name, kernel.max_dynamic_smem_nbytes)
        if kernel.non_portable_cluster:
            name = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call("cuFuncSetAttribute", function, name, 1)
        functions.append(function)
    return functions


def relocate(launch: Launch, memory: DeviceMemory) -> bytearray:
    """Return the parameter buffer of a launch with every relocation replaced by its address."""
    params = bytearray(launch.params)
    for relocation in launch.relocations:
        address = memory.address(relocation.pointer) & 0xFFFF_FFFF_FFFF_FFFF
        struct.pack_into("<Q", params, relocation.param_offset, address)
    return params


def instantiated(add: Callable[[Handle], object]) -> Handle:
    """Return an executable graph of the nodes that ``add`` adds. Raises CudaError."""
    graph = call("cuGraphCreate", 0)
    try:
        add(graph)
        return call("cuGraphInstantiate", graph, 0)
    finally:
        release("cuGraphDestroy", graph)


def add_program(
    graph: Handle,
    program: Program,
    functions: Sequence[Handle],
    memory: DeviceMemory,
    control: Control | None = None,
    crops: Crops | None = None,
) -> Ends:
    """Add the nodes of each launch, copy, fill, loop and branch of a program to a graph, with the edges between them.

    ``control`` is needed for loops and branches, ``crops`` for outputs that are cropped.
    """
    last: list[Handle] = []
    first: list[Handle] = []
    followed: set[int] = set()
    for (_, command), before in zip(program.work, edges(program.commands), strict=True):
        nodes = add_command(graph, command, functions, memory, control, crops)
        for programmatic in (False, True):
            sources = [last[edge.source] for edge in before if edge.programmatic is programmatic]
            add_edges(graph, sources, [nodes.first], programmatic=programmatic)
        followed.update(edge.source for edge in before)
        last.append(nodes.last)
        if not before:
            first.append(nodes.first)
    return Ends(first, [node for number, node in enumerate(last) if number not in followed])


def add_command(
    graph: Handle,
    command: Work,
    functions: Sequence[Handle],
    memory: DeviceMemory,
    control: Control | None = None,
    crops: Crops | None = None,
) -> Nodes:
    """Add one command to a graph, without edges to others, and return its nodes; see `add_program`."""
    match command:
        case Launch():
            node = _add_launch(graph, command, functions[command.kernel], relocate(command, memory))
        case Memcpy():
            node = add_copy(graph, memory.address(command.dst), memory.address(command.src), command.nbytes)
        case Memset():
            filling = Filling(command.value, command.element_nbytes, command.count)
            node = add_fill(graph, memory.address(command.dst), filling)
        case While() | Switch():
            assert control is not None
            return control.add(graph, command, functions, memory)
        case Crop():
            assert crops is not None
            node = crops.add(graph, command, memory)
    return Nodes(node, node)


def add_kernel(
    graph: Handle,
    function: Handle,
    grid: Dim3,
    block: Dim3,
    params: PackedParameters | SeparateParameters,
    smem_nbytes: int = 0,
) -> Handle:
    """Add a kernel's launch to a graph, without edges, and return its node."""
    node_params = bindings().CUDA_KERNEL_NODE_PARAMS()
    node_params.func = function
    node_params.gridDimX, node_params.gridDimY, node_params.gridDimZ = grid
    node_params.blockDimX, node_params.blockDimY, node_params.blockDimZ = block
    node_params.sharedMemBytes = smem_nbytes
    if isinstance(params, PackedParameters):
        node_params.extra = params.extra
    else:
        node_params.kernelParams = params.kernel_params
    return call("cuGraphAddKernelNode", graph, None, 0, node_params)


def _add_launch(graph: Handle, launch: Launch, function: Handle, params: bytearray) -> Handle:
    driver = bindings()
    given = SeparateParameters(function, bytes(params)) if launch.cooperative else PackedParameters(bytes(params))
    node = add_kernel(graph, function, launch.grid, launch.block, given, launch.dynamic_smem_nbytes)
    if any(launch.cluster):
        value = driver.CUkernelNodeAttrValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = launch.cluster
        name = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        call("cuGraphKernelNodeSetAttribute", node, name, value)
    if launch.cooperative:
        value = driver.CUkernelNodeAttrValue()
        value.cooperative = 1
        name = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        call("cuGraphKernelNodeSetAttribute", node, name, value)
    return node


def add_copy(graph: Handle, dst: int, src: int, nbytes: int) -> Handle:
    """Add a copy on the device to a graph, without edges, and return its node."""
    return _add_memcpy(graph, _on_device(dst, src), nbytes)


def add_rows(graph: Handle, dst: int, src: int, rows: Rows) -> Handle:
    """Add a 2D copy on the device to a graph, without edges, and return its node."""
    params = _on_device(dst, src)
    params.dstPitch, params.srcPitch = rows.to_pitch, rows.source_pitch
    params.dstHeight = params.srcHeight = rows.height
    return _add_memcpy(graph, params, rows.width, rows.height)


def add_upload(graph: Handle, dst: int, src: int, nbytes: int) -> Handle:
    """Add a copy from page-locked memory to a graph, without edges, and return its node."""
    params = _to_device(dst)
    params.srcMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_HOST
    params.srcHost = src
    return _add_memcpy(graph, params, nbytes)


def add_download(graph: Handle, dst: int, src: int, nbytes: int) -> Handle:
    """Add a copy to page-locked memory to a graph, without edges, and return its node."""
    params = bindings().CUDA_MEMCPY3D()
    params.srcMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcDevice = src
    params.dstMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_HOST
    params.dstHost = dst
    return _add_memcpy(graph, params, nbytes)


def _on_device(dst: int, src: int) -> Any:
    params = _to_device(dst)
    params.srcMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcDevice = src
    return params


def _to_device(dst: int) -> Any:
    params = bindings().CUDA_MEMCPY3D()
    params.dstMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstDevice = dst
    return params


def _add_memcpy(graph: Handle, params: Any, width: int, height: int = 1) -> Handle:
    params.WidthInBytes, params.Height, params.Depth = width, height, 1
    return call("cuGraphAddMemcpyNode", graph, None, 0, params, call("cuCtxGetCurrent"))


def add_fill(graph: Handle, dst: int, filling: Filling) -> Handle:
    """Add a fill to a graph, without edges, and return its node."""
    params = bindings().CUDA_MEMSET_NODE_PARAMS()
    params.dst = dst
    params.value, params.elementSize, params.width, params.height, params.pitch = filling
    return call("cuGraphAddMemsetNode", graph, None, 0, params, call("cuCtxGetCurrent"))


def add_record(graph: Handle, event: Handle) -> Handle:
    """Add the record of an event to a graph, without edges, and return its node."""
    return call("cuGraphAddEventRecordNode", graph, None, 0, event)


def add_edges(graph: Handle, before: Sequence[Handle], after: Sequence[Handle], *, programmatic: bool = False) -> None:
    """Make each node of ``after`` start once all of ``before`` have ended, or wait for that itself."""
    pairs = [(source, node) for node in after for source in before]
    if pairs:
        sources, nodes = zip(*pairs, strict=True)
        # The driver (580) applies the data of a call's first edge to all its edges, so each kind has a call of its own.
        data = [_edge_data(programmatic=programmatic) for _ in pairs]
        call("cuGraphAddDependencies", graph, list(sources), list(nodes), data, len(pairs))


def _edge_data(*, programmatic: bool) -> Handle:
    driver = bindings()
    data = driver.CUgraphEdgeData()
    if programmatic:
        data.from_port = _PROGRAMMATIC_PORT
        data.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return data


def edges(commands: Iterable[Command]) -> tuple[tuple[Edge, ...], ...]:
    """Return, for each work command (launch, memcpy, memset) in issue order, what it depends on.

    It depends on the work before it on its stream and on what it waits for; an edge that the others
    imply is left out. Edges are in ascending order of source. The commands must be those of a
    verified program: every wait follows the record of its event.
    """
    # For each stream, the works that its next command follows.
    frontier: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    events: dict[int, set[int]] = {}
    # For each work, the set of all earlier works, as bits.
    before: list[int] = []
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
