"""Read the nodes of a captured graph into plain records."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from nimblec.base.errors import UnsupportedModelError
from nimblert.cuda.driver import Handle, bindings, call, parameter_layout
from nimblert.plan import Dim3, Parameter

_PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*
_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A CUfunction or CUkernel of this process: its mangled name and its parameters.

    ``module`` and ``library`` are the handles it belongs to, 0 where it has none.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    module: int
    library: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNode:
    """A kernel launch with the bytes of its parameters, packed at their offsets."""

    function: Function
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem_nbytes: int
    cooperative: bool
    params: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcpyNode:
    """A contiguous copy between two device addresses."""

    dst: int
    src: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemsetNode:
    """``count`` elements from ``dst`` set to ``value``."""

    dst: int
    value: int
    element_nbytes: int
    count: int


Node: TypeAlias = KernelNode | MemcpyNode | MemsetNode | None
"""None is an empty node, which only joins edges."""


def node_handles(graph: int) -> list[Handle]:
    """Return the nodes of a graph in the order in which they were captured."""
    count = call("cuGraphGetNodes", graph, 0)[1]
    return list(call("cuGraphGetNodes", graph, count)[0])[:count] if count else []


def triggers(graph: int, nodes: list[Handle]) -> Iterator[tuple[int, int]]:
    """Yield the positions in ``nodes`` of each node and one that waits for its trigger, not for its end."""
    count = call("cuGraphGetEdges", graph, 0)[-1]
    if count:
        position = {int(n): i for i, n in enumerate(nodes)}
        for before, after, data in zip(*call("cuGraphGetEdges", graph, count)[:3], strict=True):
            if data.from_port == _PROGRAMMATIC_PORT:
                yield position[int(before)], position[int(after)]


def read_node(node: Handle) -> Node:
    """Return a node as a record. Raises UnsupportedModelError for what a plan cannot hold."""
    driver = bindings()
    kinds = driver.CUgraphNodeType
    kind = call("cuGraphNodeGetType", node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
        return _read_kernel(node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
        return _read_memcpy(node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
        return _read_memset(node)
    if kind == kinds.CU_GRAPH_NODE_TYPE_EMPTY:
        return None
    found = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    raise UnsupportedModelError(
        f"it puts a {found} node into the CUDA graph; a plan holds kernels, device copies and fills only"
    )


def _read_kernel(node: Handle) -> KernelNode:
    params = call("cuGraphKernelNodeGetParams", node)
    function = _describe(int(params.func), int(params.kern))
    names = bindings().CUkernelNodeAttrID
    # Members are views of the value, which must outlive them.
    cluster = call("cuGraphKernelNodeGetAttribute", node, names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    cooperative = call("cuGraphKernelNodeGetAttribute", node, names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    return KernelNode(
        function=function,
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        cluster=(cluster.clusterDim.x, cluster.clusterDim.y, cluster.clusterDim.z),
        dynamic_smem_nbytes=params.sharedMemBytes,
        cooperative=bool(cooperative.cooperative),
        params=_read_params(function.parameters, int(params.kernelParams or 0), int(params.extra or 0)),
    )


def forget_functions() -> None:
    """Describe functions anew: the driver gives the handles of unloaded ones to others."""
    _describe.cache_clear()


@cache
def _describe(func: int, kern: int) -> Function:
    """Describe the function of a node, which names its code by ``func``, ``kern`` or both."""
    driver = bindings()
    library = 0
    if kern:
        kernel = driver.CUkernel(kern)
        library = int(call("cuKernelGetLibrary", kernel))
        function = driver.CUfunction(func) if func else call("cuKernelGetFunction", kernel)
    else:
        function = driver.CUfunction(func)
    return Function(
        symbol=call("cuFuncGetName", function).decode(),
        parameters=tuple(Parameter(offset=offset, nbytes=nbytes) for offset, nbytes in parameter_layout(function)),
        module=int(call("cuFuncGetModule", function)),
        library=library,
    )


def kernels_of(module: int) -> frozenset[str]:
    """Return the mangled names of the kernels of a CUmodule of this process."""
    handle = bindings().CUmodule(module)
    count = call("cuModuleGetFunctionCount", handle)
    functions = call("cuModuleEnumerateFunctions", count, handle)
    return frozenset(call("cuFuncGetName", function).decode() for function in functions)


def _read_params(layout: tuple[Parameter, ...], kernel_params: int, extra: int) -> bytes:
    nbytes = max((p.offset + p.nbytes for p in layout), default=0)
    packed = bytearray(nbytes)
    if extra:
        found = _read_extra(extra)
        packed[: len(found)] = found[:nbytes]
    elif layout:
        pointers = (ctypes.c_uint64 * len(layout)).from_address(kernel_params)
        for parameter, address in zip(layout, pointers, strict=True):
            packed[parameter.offset : parameter.offset + parameter.nbytes] = ctypes.string_at(
                address, parameter.nbytes
            )
    return bytes(packed)


def _read_extra(extra: int) -> bytes:
    """Return the packed buffer that an ``extra`` list (key, value, key, value, 0) describes."""
    words = (ctypes.c_uint64 * 5).from_address(extra)
    entries = dict(zip(words[0:4:2], words[1:4:2], strict=True))
    nbytes = ctypes.c_size_t.from_address(entries[_PARAM_BUFFER_SIZE]).value
    return ctypes.string_at(entries[_PARAM_BUFFER_POINTER], nbytes)


def _read_memcpy(node: Handle) -> MemcpyNode:
    params = call("cuGraphMemcpyNodeGetParams", node)
    device = bindings().CUmemorytype
    on_device = (device.CU_MEMORYTYPE_DEVICE, device.CU_MEMORYTYPE_UNIFIED)
    if params.srcMemoryType not in on_device:
        raise UnsupportedModelError(
            "it copies from host memory while it runs, and a plan would replay a dangling address: "
            "create the tensor once, in __init__, as a buffer on the device"
        )
    if params.dstMemoryType not in on_device:
        raise UnsupportedModelError(
            "it copies to host memory while it runs (.cpu(), .item(), .tolist()): return the tensor instead"
        )
    if params.Height != 1 or params.Depth != 1:
        raise UnsupportedModelError("it makes a two- or three-dimensional copy, which a plan cannot hold yet")
    dst, src = int(params.dstDevice) + params.dstXInBytes, int(params.srcDevice) + params.srcXInBytes
    return MemcpyNode(dst=dst, src=src, nbytes=params.WidthInBytes)


def _read_memset(node: Handle) -> MemsetNode:
    params = call("cuGraphMemsetNodeGetParams", node)
    if params.height != 1:
        raise UnsupportedModelError("it fills a two-dimensional range, which a plan cannot hold yet")
    return MemsetNode(
        dst=int(params.dst), value=params.value, element_nbytes=params.elementSize, count=params.width
    )
