"""A fake CUDA driver on host memory: streams, events, graphs with conditional nodes, and nimblert's own kernels.

Work on a stream is done immediately, but for copies from pageable memory and fills, which CUDA puts on the default
stream: they are done when something waits for that stream, or uses it. Other kernels do not run. Freed memory is filled
with 0xDD until its address is used again, so that a read of it by mistake shows.
"""

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from nimblert.arrays.layouts import MOST_AXES

_FREED = 0xDD
_TOTAL_NBYTES = 1 << 30
_SUCCESS = real.CUresult.CUDA_SUCCESS
_INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
_ATTRIBUTES = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}
_FIRST_CONTEXT = 0x100
"""The context of device 0; those of other devices follow."""
_ALWAYS = frozenset(
    {
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuDeviceGet",
        "cuDeviceGetCount",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxRetain",
    }
)
"""Functions that still work after a kernel has failed."""
_CODES = {b"go_on": 101, b"choose": 102}
_GO_ON, _CHOOSE = struct.Struct("<QQQQQII"), struct.Struct("<QQI")
_GATHER = struct.Struct(f"<QQII{MOST_AXES}I{MOST_AXES}q")


@dataclass(eq=False)
class _Handle:
    """An object of the driver. ``number`` is what ``int`` gives."""

    number: int

    def __int__(self) -> int:
        return self.number


@dataclass(eq=False)
class _Graph:
    """``nodes`` with their work, and for each the nodes ``before`` it."""

    nodes: dict[_Handle, list[Callable[[], object]]] = field(default_factory=dict)
    before: dict[_Handle, set[_Handle]] = field(default_factory=dict)

    def work(self) -> list[Callable[[], object]]:
        """Return the work in an order that the edges allow, nodes that were added last first where they can be."""
        left, done = list(self.nodes), list[_Handle]()
        while left:
            node = next(node for node in reversed(left) if self.before.get(node, set()) <= set(done))
            left.remove(node)
            done.append(node)
        return [work for node in done for work in self.nodes[node]]


class HostDriver:
    """A substitute for the module ``cuda.bindings.driver``, with its types and enumerations.

    ``calls`` counts the functions called, by name. ``allocated`` are the bytes at each address in use, ``live`` the
    numbers of graphs, executable graphs, streams and events. ``waits`` are pairs of streams of which the first waits
    for the second.
    """

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.calls: dict[str, int] = {}
        self.allocated: dict[int, np.ndarray] = {}
        self.live: Counter[str] = Counter()
        self.waits: list[tuple[int, int]] = []
        self.copies: list[int] = []
        """The stream of each copy that was enqueued, and of each gather."""
        self.managed: set[int] = set()
        """Addresses of memory that every device reaches."""
        self.failing: dict[str, Any] = {}
        """The status that functions of these names return."""
        self.broken = False
        """Whether every call is refused, as after a kernel that failed."""
        self.references: Counter[int] = Counter()
        """Of the primary context of each device."""
        self._on_default: list[Callable[[], object]] = []
        self._counting = threading.Lock()
        self._thread = threading.local()
        self._kept: list[np.ndarray] = []
        self._on_device: dict[int, int] = {}
        self._ordinals: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._destroyed: set[int] = set()
        self._handles = 0
        self._conditions: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        function = getattr(type(self), f"_{name}")

        def called(*args: Any) -> tuple[Any, ...]:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.failing:
                return (self.failing[name], *[None] * 2)
            if self.broken and name not in _ALWAYS:
                return (real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, *[None] * 2)
            if any(isinstance(arg, _Handle) and int(arg) in self._destroyed for arg in args):
                return (real.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED, *[None] * 2)  # or a crash
            result = function(self, *args)
            if isinstance(result, tuple):
                return result
            return (_SUCCESS,) if result is None else (_SUCCESS, result)

        setattr(self, name, called)
        return called

    @property
    def current_device(self) -> int:
        """The device of the calling thread's context."""
        return self._cuCtxGetCurrent() - _FIRST_CONTEXT

    def _handle(self) -> _Handle:
        self._handles += 1
        return _Handle(0x1000 + self._handles)

    # Devices and contexts

    def _cuInit(self, flags: int) -> None: ...

    def _cuDeviceGetCount(self) -> int:
        return self.devices

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return f"host {device}".encode()[:length]

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        del device
        return _ATTRIBUTES[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def _cuDriverGetVersion(self) -> int:
        return 13000

    def _cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        with self._counting:
            self.references[device] += 1
        return real.CUcontext(_FIRST_CONTEXT + device)

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        with self._counting:
            self.references[device] -= 1

    def _cuCtxSetCurrent(self, context: Any) -> Any:
        if not self.references[int(context) - _FIRST_CONTEXT]:
            return (real.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,)
        self._thread.context = int(context)
        return None

    def _cuCtxGetCurrent(self) -> int:
        return int(getattr(self._thread, "context", _FIRST_CONTEXT))

    def _cuCtxSynchronize(self) -> None:
        self._cuStreamSynchronize(0)

    # Memory

    def _allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 512, _FREED, np.uint8)
        address = -(-memory.ctypes.data // 512) * 512
        self.allocated[address] = memory
        return address

    def _free(self, address: int) -> Any:
        if int(address) not in self.allocated:
            return (_INVALID,)
        self._cuStreamSynchronize(0)
        memory = self.allocated.pop(int(address))
        self._on_device.pop(int(address), None)
        memory[:] = _FREED
        self._kept.append(memory)
        return None

    def _cuMemAlloc(self, nbytes: int) -> Any:
        address = self._allocate(nbytes)
        self._on_device[address] = nbytes
        self._ordinals[address] = self.current_device
        return real.CUdeviceptr(address)

    def _cuMemGetInfo(self) -> tuple[Any, int, int]:
        return _SUCCESS, _TOTAL_NBYTES - sum(self._on_device.values()), _TOTAL_NBYTES

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        del flags
        return self._allocate(nbytes)

    _cuMemFree = _cuMemFreeHost = _free

    def _cuPointerGetAttribute(self, attribute: Any, address: int) -> Any:
        assert attribute == real.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        known = any(start <= address < start + memory.size for start, memory in self.allocated.items())
        return (_SUCCESS, real.CUdeviceptr(address)) if known else (_INVALID, None)

    def _cuPointerGetAttributes(self, count: int, attributes: Sequence[Any], address: int) -> list[Any]:
        names = [attribute.name.removeprefix("CU_POINTER_ATTRIBUTE_") for attribute in attributes]
        assert names == ["MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL"]
        for start, memory in self.allocated.items():
            if start <= address < start + memory.size:
                kind = "DEVICE" if start in self._on_device else "HOST"
                of_kind = int(getattr(real.CUmemorytype, f"CU_MEMORYTYPE_{kind}"))
                return [of_kind, start in self.managed, self._ordinals.get(start, 0)]
        return [0] * count

    def _copy(self, to: Any, source: Any, nbytes: int, stream: Any = None) -> None:
        self._cuStreamSynchronize(stream or 0)
        if stream is not None:
            self.copies.append(int(stream))
        ctypes.memmove(int(to), int(source), nbytes)

    def _cuMemcpyHtoD(self, to: Any, source: Any, nbytes: int) -> None:
        self._on_default.append(partial(ctypes.memmove, int(to), ctypes.string_at(int(source), nbytes), nbytes))

    _cuMemcpyDtoH = _cuMemcpyDtoD = _copy
    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _copy

    def _cuMemsetD8(self, to: int, value: int, count: int) -> None:
        self._on_default.append(partial(ctypes.memset, to, value, count))

    def _fill_rows(self, to: int, pitch: int, value: int, width: int, height: int, itemsize: int) -> None:
        row = np.full(width, value, f"u{itemsize}").tobytes()
        for index in range(height):
            ctypes.memmove(to + index * pitch, row, len(row))

    def _memset(self, itemsize: int, to: int, pitch: int, value: int, width: int, height: int, stream: Any) -> None:
        self._cuStreamSynchronize(stream)
        self._fill_rows(to, pitch, value, width, height, itemsize)

    _cuMemsetD2D8Async = partialmethod(_memset, 1)
    _cuMemsetD2D16Async = partialmethod(_memset, 2)
    _cuMemsetD2D32Async = partialmethod(_memset, 4)

    def _cuMemcpy2DAsync(self, rows: Any, stream: Any) -> None:
        self._cuStreamSynchronize(stream)
        for row in range(rows.Height):
            to, source = int(rows.dstDevice) + row * rows.dstPitch, int(rows.srcDevice) + row * rows.srcPitch
            ctypes.memmove(to, source, rows.WidthInBytes)

    # Streams and events

    def _create(self, kind: str, flags: Any) -> _Handle:
        del flags
        self.live[kind] += 1
        return self._handle()

    def _destroy(self, kind: str, handle: _Handle) -> None:
        self.live[kind] -= 1
        self._destroyed.add(int(handle))

    _cuStreamCreate, _cuStreamDestroy = partialmethod(_create, "stream"), partialmethod(_destroy, "stream")
    _cuEventCreate, _cuEventDestroy = partialmethod(_create, "event"), partialmethod(_destroy, "event")

    def _cuStreamSynchronize(self, stream: Any) -> None:
        if not int(stream):
            with self._counting:
                while self._on_default:
                    self._on_default.pop(0)()

    def _cuEventSynchronize(self, event: _Handle) -> None: ...

    def _cuEventRecord(self, event: _Handle, stream: Any) -> None:
        self._recorded[int(event)] = int(stream)

    def _cuCtxRecordEvent(self, context: Any, event: _Handle) -> None:
        del context
        self._recorded[int(event)] = 0

    def _cuStreamWaitEvent(self, stream: Any, event: _Handle, flags: int) -> None:
        del flags
        if int(event) in self._recorded:
            self.waits.append((int(stream), self._recorded[int(event)]))

    def _cuEventElapsedTime(self, begin: _Handle, end: _Handle) -> float:
        del begin, end
        return 0.001

    # Graphs

    def _cuGraphCreate(self, flags: int) -> _Graph:
        del flags
        self.live["graph"] += 1
        return _Graph()

    def _cuGraphDestroy(self, graph: _Graph) -> None:
        del graph
        self.live["graph"] -= 1

    def _cuGraphAddMemcpyNode(self, graph: _Graph, before: Any, count: int, params: Any, context: Any) -> _Handle:
        del before, count, context
        of_host = real.CUmemorytype.CU_MEMORYTYPE_HOST
        source = int(params.srcHost if params.srcMemoryType == of_host else params.srcDevice)
        to = int(params.dstHost if params.dstMemoryType == of_host else params.dstDevice)
        nbytes, to_pitch, source_pitch = params.WidthInBytes, params.dstPitch, params.srcPitch
        assert params.Depth == 1
        rows = [(to + row * to_pitch, source + row * source_pitch) for row in range(params.Height)]
        return self._node(graph, *(partial(ctypes.memmove, *row, nbytes) for row in rows))

    def _cuGraphAddKernelNode(self, graph: _Graph, before: Any, count: int, params: Any) -> _Handle:
        del before, count
        setter = {_CODES[b"go_on"]: self._go_on, _CODES[b"choose"]: self._choose}.get(int(params.func))
        if setter is not None:
            return self._node(graph, partial(setter, _parameters(params.extra)))
        return self._node(graph, self._gather(int(params.func), params.extra))

    # Conditional nodes, and the kernels of control.cu

    @staticmethod
    def CUgraphNodeParams() -> SimpleNamespace:
        """Return the parameters of a node; only conditional nodes can be added."""
        return SimpleNamespace(conditional=SimpleNamespace())

    def _cuGraphConditionalHandleCreate(self, graph: _Graph, context: Any, value: int, flags: int) -> int:
        del graph, context, flags
        handle = int(self._handle())
        self._conditions[handle] = value
        return handle

    def _cuGraphAddNode(self, graph: _Graph, before: Any, data: Any, count: int, params: Any) -> _Handle:
        del before, data, count
        asked = params.conditional
        asked.phGraph_out = [_Graph() for _ in range(asked.size)]

        def run() -> None:
            if asked.type == real.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH:
                self._cuGraphLaunch(asked.phGraph_out[self._conditions[asked.handle]].work(), 0)
            else:
                while self._conditions[asked.handle]:
                    self._cuGraphLaunch(asked.phGraph_out[0].work(), 0)

        return self._node(graph, run)

    def _go_on(self, parameters: bytes) -> None:
        handle, condition, trips, limit, failed, loop, is_first = _GO_ON.unpack(parameters)
        is_true, count = ctypes.c_uint8.from_address(condition).value != 0, ctypes.c_uint64.from_address(trips)
        done = 0 if is_first else count.value
        if is_true and done == limit:
            ctypes.c_uint32.from_address(failed).value = loop
        count.value = done + 1
        self._conditions[handle] = int(is_true and done < limit)

    def _choose(self, parameters: bytes) -> None:
        handle, index, count = _CHOOSE.unpack(parameters)
        self._conditions[handle] = min(ctypes.c_uint8.from_address(index).value, count - 1)

    def _cuGraphAddMemsetNode(self, graph: _Graph, before: Any, count: int, params: Any, context: Any) -> _Handle:
        del before, count, context
        pattern = params.value, params.width, params.height, params.elementSize
        return self._node(graph, partial(self._fill_rows, int(params.dst), params.pitch, *pattern))

    def _cuGraphAddEventRecordNode(self, graph: _Graph, before: Any, count: int, event: _Handle) -> _Handle:
        del before, count, event
        return self._node(graph)

    def _node(self, graph: _Graph, *work: Callable[[], object]) -> _Handle:
        node = self._handle()
        graph.nodes[node] = list(work)
        return node

    def _cuGraphAddDependencies(
        self, graph: _Graph, before: Sequence[_Handle], after: Sequence[_Handle], data: Sequence[Any], count: int
    ) -> None:
        assert len(before) == len(after) == len(data) == count
        for source, node in zip(before, after, strict=True):
            graph.before.setdefault(node, set()).add(source)

    def _cuGraphInstantiate(self, graph: _Graph, flags: int) -> list[Callable[[], object]]:
        del flags
        self.live["executable graph"] += 1
        return graph.work()

    def _cuGraphExecDestroy(self, graph: object) -> None:
        del graph
        self.live["executable graph"] -= 1

    def _cuGraphUpload(self, graph: object, stream: Any) -> None: ...

    def _cuGraphLaunch(self, graph: Sequence[Callable[[], object]], stream: Any) -> None:
        self._cuStreamSynchronize(stream)
        for work in graph:
            work()

    # The kernels of layout.cu, whose functions are the bytes of an element

    def _cuModuleLoadData(self, code: Any) -> _Handle:
        del code
        return self._handle()

    def _cuModuleUnload(self, module: _Handle) -> None: ...

    def _cuModuleGetFunction(self, module: _Handle, name: bytes) -> int:
        del module
        return _CODES.get(name) or int(name.removeprefix(b"gather_"))

    def _cuLaunchKernel(self, itemsize: int, *rest: Any) -> Any:
        if not rest[0]:  # blocks
            return (_INVALID,)
        self._cuStreamSynchronize(rest[-3])
        self.copies.append(int(rest[-3]))
        self._gather(itemsize, rest[-1])()
        return None

    @staticmethod
    def _gather(itemsize: int, packed: int) -> Callable[[], None]:
        """Gather elements of ``itemsize`` bytes, as layout.cu does."""
        to, source, count, rank, *axes = _GATHER.unpack(_parameters(packed))
        sizes, strides = axes[:rank], [stride * itemsize for stride in axes[MOST_AXES : MOST_AXES + rank]]
        assert np.prod(sizes) == count

        def work() -> None:
            _array(to, (count,), (itemsize,), itemsize)[...] = _array(source, sizes, strides, itemsize).ravel()

        return work


def _parameters(packed: int) -> bytes:
    """Return the parameters of a launch."""
    extra = (ctypes.c_uint64 * 5).from_address(packed)
    return ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)


def _array(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> np.ndarray:
    interface = {"version": 3, "typestr": f"|V{itemsize}", "shape": tuple(shape), "strides": tuple(strides)}
    return np.asarray(SimpleNamespace(__array_interface__={**interface, "data": (address, False)}))


class LateDriver(HostDriver):
    """A driver whose uploads wait until something waits for them, or for an event that was recorded after them."""

    def __init__(self) -> None:
        super().__init__()
        self._enqueued: list[tuple[Any, ...]] = []
        self._before: dict[int, int] = {}
        """How many copies had been enqueued when an event was recorded."""
        self._done = 0

    def _cuMemcpyHtoDAsync(self, to: Any, source: Any, nbytes: int, stream: Any = None) -> None:
        del stream
        self._enqueued.append((to, source, nbytes))

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        del stream
        self._before[int(event)] = len(self._enqueued)

    def _cuEventSynchronize(self, event: Any) -> None:
        self._run(self._before.get(int(event), 0))

    def _cuCtxSynchronize(self) -> None:
        self._run(len(self._enqueued))

    def _run(self, until: int) -> None:
        for copy in self._enqueued[self._done : until]:
            self._copy(*copy)
        self._done = max(self._done, until)
