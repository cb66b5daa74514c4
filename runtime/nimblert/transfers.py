"""The ways into and out of a program on a GPU: from and to arrays of the host, and of the GPU itself.

An array of the host is copied to page-locked memory as it lies, in parallel where it is large, and
uploaded; where its axes lie in another order than the program reads, a kernel of ours lays them out on
the device. An array of the GPU is copied or laid out there.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from nimblert import driver, layouts, padding
from nimblert.device_arrays import DeviceArray, DeviceOutput
from nimblert.driver import Context, Handle, call, extra_parameters
from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError
from nimblert.layouts import Gather
from nimblert.memory import DeviceMemory, Staging, allocate, strided
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.pools import DevicePool, PageLockedPool

_PTX = Path(__file__).with_name("layout.ptx")
_BLOCK = 256
_MOST_BLOCKS = 1 << 16

_CHUNK_NBYTES = 1 << 20
"""Arrays of more than two such chunks are copied by several threads, each chunk uploaded as it is there."""

_COPIERS = 4


class GatherKernels:
    """The kernels of layout.cu, compiled by the driver when the first is needed."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @cached_property
    def _functions(self) -> dict[int, Handle]:
        text = _PTX.read_bytes() + b"\0"
        module = self._context.acquire(call("cuModuleLoadData", text), "cuModuleUnload")
        return {n: call("cuModuleGetFunction", module, f"gather_{n}".encode()) for n in (1, 2, 4, 8, 16)}

    def launch(self, to: int, source: int, gather: Gather, itemsize: int, stream: Handle) -> None:
        """Fill the destination at ``to`` from ``source``, both device addresses."""
        params = to.to_bytes(8, "little") + source.to_bytes(8, "little") + gather.parameters
        blocks = min(-(-gather.count // _BLOCK), _MOST_BLOCKS)
        with extra_parameters(params) as extra:
            call("cuLaunchKernel", self._functions[itemsize], blocks, 1, 1, _BLOCK, 1, 1, 0, stream, 0, extra)

    def move(self, to: int, source: int, gather: Gather, itemsize: int, stream: Handle) -> None:
        """As `launch`, by a plain copy where the source lies as the destination does."""
        if not gather.is_copy:
            self.launch(to, source, gather, itemsize, stream)
        elif gather.count:
            call("cuMemcpyDtoDAsync", to, source, gather.count * itemsize, stream)


class Inlet:
    """Where the inputs of a program come in. ``staging`` is page-locked memory that mirrors them."""

    def __init__(
        self,
        context: Context,
        tensors: Sequence[Tensor],
        memory: DeviceMemory,
        staging: Staging,
        kernels: GatherKernels,
    ) -> None:
        self._context = context
        self._tensors = tensors
        self._addresses = [memory.address(tensor.pointer) for tensor in tensors]
        self._staging = staging
        self._kernels = kernels
        self._landing: dict[int, int] = {}
        self._known: dict[tuple[int, tuple[int, ...]], Gather | None] = {}

    def put(self, index: int, array: np.ndarray | DeviceArray, stream: Handle) -> None:
        """Have input ``index`` hold an array of its dtype and shape, for what comes next on ``stream``.

        An array of a smaller shape fills the head of the input, and the rest is padded.
        """
        tensor = self._tensors[index]
        if not tensor.span_nbytes:
            return
        if tuple(array.shape) != tensor.shape:
            self._pad(index, array, stream)
        elif isinstance(array, DeviceArray):
            self._from_device(index, array, stream)
        else:
            self._from_host(index, array, stream)

    def _pad(self, index: int, array: np.ndarray | DeviceArray, stream: Handle) -> None:
        tensor = self._tensors[index]
        if not isinstance(array, DeviceArray):
            padding.place(self._staging.views[index], array, padding.filling(tensor))
            self._staging.upload(index, stream)
            return
        address, itemsize = self._addresses[index], ITEM_NBYTES[tensor.dtype]
        _fill(address, tensor, stream)
        gather = layouts.gather(array.shape, tensor.strides, array.strides)
        if gather is not None:
            self._kernels.move(address, array.address, gather, itemsize, stream)
            return
        dense = layouts.dense_strides(array.shape, tensor.strides)
        gather = layouts.gather(array.shape, dense, array.strides)
        if gather is None:
            raise InputError(f"input {tensor.name!r}: strides {array.strides} cannot be laid out on the device")
        landing = self._landing_of(index, prod(tensor.shape) * itemsize)
        self._kernels.move(landing, array.address, gather, itemsize, stream)
        _copy_rows((address, tensor.strides), (landing, dense), array.shape, itemsize, stream)

    def _gather(self, index: int, strides: tuple[int, ...]) -> Gather | None:
        key = index, strides
        if key not in self._known:
            tensor = self._tensors[index]
            self._known[key] = layouts.gather(tensor.shape, tensor.strides, strides)
        return self._known[key]

    def _from_device(self, index: int, array: DeviceArray, stream: Handle) -> None:
        tensor = self._tensors[index]
        gather = self._gather(index, array.strides)
        if gather is None:
            raise InputError(f"input {tensor.name!r}: strides {array.strides} cannot be laid out on the device")
        self._kernels.move(self._addresses[index], array.address, gather, ITEM_NBYTES[tensor.dtype], stream)

    def _from_host(self, index: int, array: np.ndarray, stream: Handle) -> None:
        strides = layouts.element_strides(array)
        if strides is None or not layouts.is_dense(array.shape, strides):
            array = np.ascontiguousarray(array)
            strides = layouts.element_strides(array) or ()
        gather = self._gather(index, strides)
        if gather is None:  # the program reads it with holes, as only views of views lie
            np.copyto(self._staging.views[index], array)
            self._staging.upload(index, stream)
            return
        flat = layouts.in_memory_order(array).view(np.uint8)
        address = self._addresses[index] if gather.is_copy else self._landing_of(index, flat.nbytes)
        self._upload(index, flat, address, stream)
        if not gather.is_copy:
            self._kernels.launch(self._addresses[index], address, gather, array.itemsize, stream)

    def _landing_of(self, index: int, nbytes: int) -> int:
        """Device memory for an input as it came."""
        if index not in self._landing:
            self._landing[index] = allocate(self._context, nbytes)
        return self._landing[index]

    def _upload(self, index: int, flat: np.ndarray, address: int, stream: Handle) -> None:
        staged, host = self._staging.bytes_of(index)
        if flat.nbytes <= 2 * _CHUNK_NBYTES:
            np.copyto(staged[: flat.nbytes], flat)
            call("cuMemcpyHtoDAsync", address, host, flat.nbytes, stream)
            return

        def copy(start: int) -> int:
            np.copyto(staged[start : start + _CHUNK_NBYTES][: flat.nbytes - start], flat[start : start + _CHUNK_NBYTES])
            return start

        for start in _copiers().map(copy, range(0, flat.nbytes, _CHUNK_NBYTES)):
            nbytes = min(_CHUNK_NBYTES, flat.nbytes - start)
            call("cuMemcpyHtoDAsync", address + start, host + start, nbytes, stream)


class Outlet:
    """Where the outputs of a program go. ``staging`` is page-locked memory that mirrors them."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        memory: DeviceMemory,
        staging: Staging,
        kernels: GatherKernels,
        pools: "Pools",
    ) -> None:
        self._tensors = tensors
        self._addresses = [memory.address(tensor.pointer) for tensor in tensors]
        self._staging = staging
        self._kernels = kernels
        self._pools = pools

    def begin(
        self,
        index: int,
        out: np.ndarray | DeviceArray | None,
        stream: Handle,
        *,
        reuse: bool,
        on_device: bool,
        shape: tuple[int, ...] | None = None,
    ) -> Callable[[], np.ndarray | DeviceOutput]:
        """Enqueue what brings an output to where it goes; what is returned gives it when the stream is done.

        ``out`` is an array of the caller. Else it is one of the device or of the host, new or, with
        ``reuse``, over memory that the next run writes. ``shape`` is that of the output's head, where no more
        is asked for.
        """
        tensor = self._tensors[index] if shape is None else padding.head(self._tensors[index], shape)
        if isinstance(out, DeviceArray):
            return self._to_device(index, tensor, out, stream)
        if out is None and on_device:
            return self._new_on_device(index, tensor, stream, reuse=reuse)
        if out is None and not reuse and tensor.span_nbytes:
            address, memory = self._pools.host.take(tensor.span_nbytes)
            call("cuMemcpyDtoHAsync", address, self._addresses[index], tensor.span_nbytes, stream)
            return partial(strided, memory, tensor)
        self._staging.download(index, stream)
        view = self._staging.views[index]
        return partial(_copied, view if shape is None else view[tuple(map(slice, shape))], out)

    def empty(self, tensor: Tensor, stream: Handle) -> DeviceArray:
        """A new array for an output, C-contiguous."""
        shape = tensor.shape
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        address, keeper = self._pools.device.take(prod(shape) * ITEM_NBYTES[tensor.dtype], stream)
        return DeviceArray(
            address=address,
            dtype=tensor.dtype,
            shape=shape,
            strides=strides,
            device=self._pools.ordinal,
            owner=keeper,
        )

    def _to_device(
        self, index: int, tensor: Tensor, out: DeviceArray, stream: Handle
    ) -> Callable[[], DeviceOutput]:
        itemsize, address = ITEM_NBYTES[tensor.dtype], self._addresses[index]
        gather = layouts.gather(tensor.shape, out.strides, tensor.strides)
        if gather is not None:
            self._kernels.move(out.address, address, gather, itemsize, stream)
        elif layouts.overlaps(out.shape, out.strides):
            raise InputError(f"out {tensor.name!r}: strides {out.strides} cannot be written on the device")
        else:
            _copy_rows((out.address, out.strides), (address, tensor.strides), tensor.shape, itemsize, stream)
        return partial(DeviceOutput, out)

    def _new_on_device(
        self, index: int, tensor: Tensor, stream: Handle, *, reuse: bool
    ) -> Callable[[], DeviceOutput]:
        address, keeper = self._addresses[index], None
        if not reuse and tensor.span_nbytes:
            address, keeper = self._pools.device.take(tensor.span_nbytes, stream)
            call("cuMemcpyDtoDAsync", address, self._addresses[index], tensor.span_nbytes, stream)
        array = DeviceArray(
            address=address,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=tensor.strides,
            device=self._pools.ordinal,
            owner=keeper,
        )
        return partial(DeviceOutput, array)


def _fill(address: int, tensor: Tensor, stream: Handle) -> None:
    """Have all of an input hold what stands where a caller gives nothing."""
    value, nbytes = padding.filling(tensor), tensor.span_nbytes
    if not value:
        call("cuMemsetD8Async", address, 0, nbytes, stream)
        return
    words = np.array(value, numpy_dtype(tensor.dtype)).reshape(1).view(f"u{min(ITEM_NBYTES[tensor.dtype], 4)}")
    pitch = ITEM_NBYTES[tensor.dtype]
    for position, word in enumerate(words.tolist()):
        bits = 8 * words.itemsize
        call(f"cuMemsetD2D{bits}Async", address + position * 4, pitch, word, 1, nbytes // pitch, stream)


def _copy_rows(
    to: tuple[int, Sequence[int]],
    source: tuple[int, Sequence[int]],
    shape: Sequence[int],
    itemsize: int,
    stream: Handle,
) -> None:
    """Copy elements on the device; addresses with strides in elements. Rows that lie alike are one copy."""
    axes = sorted(zip(to[1], source[1], shape, strict=True), reverse=True)
    width = 1
    while axes and axes[-1][:2] == (width, width):
        width *= axes.pop()[2]
    to_pitch, source_pitch, height = axes.pop() if axes else (width, width, 1)
    names = driver.bindings()
    rows = names.CUDA_MEMCPY2D()
    rows.srcMemoryType = rows.dstMemoryType = names.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rows.WidthInBytes, rows.Height = width * itemsize, height
    rows.dstPitch, rows.srcPitch = to_pitch * itemsize, source_pitch * itemsize
    for at in product(*(range(size) for _, _, size in axes)):
        rows.dstDevice = to[0] + itemsize * sum(i * stride for i, (stride, _, _) in zip(at, axes, strict=True))
        rows.srcDevice = source[0] + itemsize * sum(i * stride for i, (_, stride, _) in zip(at, axes, strict=True))
        call("cuMemcpy2DAsync", rows, stream)


def _copied(view: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return view
    np.copyto(out, view)
    return out


class Pools:
    """Memory on a GPU and beside it for the outputs that callers keep."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.host = PageLockedPool(Context(ordinal))
        self.device = DevicePool(Context(ordinal))

    def close(self) -> None:
        """Free what nobody has."""
        self.host.close()
        self.device.close()


def _copiers() -> ThreadPoolExecutor:
    """The threads that fill page-locked memory, made in each process when they are first needed."""
    process = os.getpid()
    if process not in _pools:
        _pools.clear()  # those of the process that forked this one are not here
        _pools[process] = ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1), "nimblert-copy")
    return _pools[process]


_pools: dict[int, ThreadPoolExecutor] = {}
