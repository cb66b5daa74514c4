"""The inputs and outputs of a program on a GPU: transfers from and to arrays on the host and on the GPU.

An array on the host is copied to page-locked memory in its own layout, in parallel where it is large, and uploaded; if
its axes are in another order than the program's, a kernel permutes them on the device. An array on the GPU is copied or
permuted there.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

import numpy as np

from nimblert.arrays import dlpack, layouts, padding
from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.cuda import graph
from nimblert.cuda.call_graphs import Arrival, Step
from nimblert.cuda.copiers import PART_NBYTES, copied
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.memory import DeviceMemory, Staging, allocate
from nimblert.cuda.movers import GatherKernels, Mover, copy_rows
from nimblert.cuda.pools import HostLayout, Lent, Pools
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor

_SMALL_NBYTES = 2 * PART_NBYTES
"""Larger arrays are copied by several threads, and each part is uploaded when it is complete."""

_MOST_LAYOUTS = 16
"""The most layouts that are remembered for an input."""

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Way:
    """How arrays of one layout get from the host into an input.

    An array is copied to ``staged``, page-locked memory in that layout at address ``host``, uploaded to ``device``, and
    permuted by ``mover`` unless that is None.
    """

    staged: np.ndarray
    host: int
    device: int
    nbytes: int
    mover: Mover | None


class Inlet:
    """The transfers into the inputs of a program. ``staging`` is page-locked memory that mirrors them."""

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
        self._nbytes = [tensor.span_nbytes for tensor in tensors]
        self.is_small = max(self._nbytes, default=0) <= _SMALL_NBYTES
        """Whether every input is too small to be copied by several threads."""
        self._staging = staging
        self._kernels = kernels
        self._landing: dict[int, int] = {}
        self._ways: list[dict[tuple[int, ...], _Way]] = [{} for _ in tensors]
        self.movers: list[dict[bytes, Mover]] = [{} for _ in tensors]
        """For each input its movers of device arrays, by `dlpack.raw_numbers` of their strides."""

    def moved(self, memory: DeviceMemory) -> None:
        """Transfer to the inputs in this memory from now on."""
        self._addresses = [memory.address(tensor.pointer) for tensor in self._tensors]
        self._ways = [{} for _ in self._tensors]

    def put(self, index: int, array: np.ndarray | DeviceArray, stream: Handle) -> None:
        """Enqueue the transfer of an array into input ``index``, whose dtype it has.

        An array of a smaller shape fills the start of the input along each axis, and the rest is padded.
        """
        if not self._nbytes[index]:
            return
        if array.shape != self._tensors[index].shape:
            self._pad(index, array, stream)
            return
        if isinstance(array, DeviceArray):
            self._from_device(index, array, stream)
            return
        way = self._way_of(index, array)
        self._upload(way, array, stream)
        if way.mover is not None:
            way.mover.move(self._addresses[index], way.device, stream)

    def uploads(self, arrays: Sequence[np.ndarray]) -> list[Arrival]:
        """The transfers of host arrays with the layouts of these, as nodes of a graph."""
        found = []
        for index, array in enumerate(arrays):
            way = self._way_of(index, array)
            steps = [partial(graph.add_upload, dst=way.device, src=way.host, nbytes=way.nbytes)]
            if way.mover is not None:
                steps.append(partial(way.mover.add, to=self._addresses[index], source=way.device))
            found.append(Arrival(steps, way.staged))
        return found

    def moves(self, arrays: Sequence[tuple[Mover, int]]) -> list[Step]:
        """The transfers of device arrays, each given as one of its `movers` and an address, as nodes of a graph."""
        return [
            partial(mover.add, to=to, source=address)
            for (mover, address), to in zip(arrays, self._addresses, strict=True)
        ]

    def move(self, arrays: Sequence[tuple[Mover, int]], stream: Handle) -> None:
        """Enqueue the transfer of a device array into every input, given as one of its `movers` and an address."""
        for (mover, address), to in zip(arrays, self._addresses, strict=True):
            mover.move(to, address, stream)

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
            self._kernels.mover(gather, itemsize).move(address, array.address, stream)
            return
        dense = layouts.dense_like(array.shape, tensor.strides)
        gather = layouts.gather(array.shape, dense, array.strides)
        if gather is None:
            raise InputError(f"input {tensor.name!r}: strides {array.strides} cannot be laid out on the device")
        landing = self._landing_of(index, prod(tensor.shape) * itemsize)
        self._kernels.mover(gather, itemsize).move(landing, array.address, stream)
        copy_rows((address, tensor.strides), (landing, dense), array.shape, itemsize, stream)

    def _from_device(self, index: int, array: DeviceArray, stream: Handle) -> None:
        strides = dlpack.raw_numbers(array.strides)
        mover = self.movers[index].get(strides)
        if mover is None:
            made = self._kernels.mover_to("input", self._tensors[index], array.strides)
            mover = _remembered(self.movers[index], strides, made)
        mover.move(self._addresses[index], array.address, stream)

    def _way_of(self, index: int, array: np.ndarray) -> _Way:
        way = self._ways[index].get(array.strides)
        if way is not None:
            return way
        if not layouts.is_dense(array.shape, array.strides, array.itemsize):
            array = np.ascontiguousarray(array)
        return _remembered(self._ways[index], array.strides, self._way(index, array))

    def _way(self, index: int, array: np.ndarray) -> _Way:
        """Of a dense array."""
        tensor, address = self._tensors[index], self._addresses[index]
        memory, host = self._staging.bytes_of(index)
        gather = layouts.gather(tensor.shape, tensor.strides, layouts.element_strides(array))
        if gather is None:  # the program reads it with gaps
            return _Way(self._staging.views[index], host, address, self._nbytes[index], None)
        staged = np.ndarray(array.shape, array.dtype, memory, strides=array.strides)
        if gather.is_copy:
            return _Way(staged, host, address, array.nbytes, None)
        mover = self._kernels.mover(gather, array.itemsize)
        return _Way(staged, host, self._landing_of(index, array.nbytes), array.nbytes, mover)

    def _landing_of(self, index: int, nbytes: int) -> int:
        """Device memory for an array before it is permuted into an input."""
        if index not in self._landing:
            self._landing[index] = allocate(self._context, nbytes)
        return self._landing[index]

    def _upload(self, way: _Way, array: np.ndarray, stream: Handle) -> None:
        if way.nbytes <= _SMALL_NBYTES or way.staged.strides != array.strides:
            np.copyto(way.staged, array)
            call("cuMemcpyHtoDAsync", way.device, way.host, way.nbytes, stream)
            return
        to, source = (layouts.in_memory_order(each).view(np.uint8) for each in (way.staged, array))
        with closing(copied(to, source)) as parts:
            for start in parts:
                nbytes = min(PART_NBYTES, way.nbytes - start)
                call("cuMemcpyHtoDAsync", way.device + start, way.host + start, nbytes, stream)


class Outlet:
    """The transfers of the outputs of a program. ``staging`` is page-locked memory that mirrors them."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        memory: DeviceMemory,
        staging: Staging,
        kernels: GatherKernels,
        pools: Pools,
    ) -> None:
        self._tensors = tensors
        self._addresses = [memory.address(tensor.pointer) for tensor in tensors]
        self._nbytes = [tensor.span_nbytes for tensor in tensors]
        self._layouts = [HostLayout.of(tensor) for tensor in tensors]
        self._staging = staging
        self._kernels = kernels
        self._pools = pools

    def moved(self, memory: DeviceMemory) -> None:
        """Transfer from the outputs in this memory from now on."""
        self._addresses = [memory.address(tensor.pointer) for tensor in self._tensors]

    def to_host(self, index: int, stream: Handle, *, reuse: bool, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Enqueue the download of an output, and return the array that then holds it.

        It is new, or with ``reuse`` a view of memory that the next run overwrites. ``shape`` crops the output.
        """
        if reuse or not self._nbytes[index]:
            self._staging.download(index, stream)
            view = self._staging.views[index]
            return view if shape is None else view[tuple(map(slice, shape))]
        nbytes, layout = self._nbytes[index], self._layouts[index]
        if shape is not None:
            head = padding.head(self._tensors[index], shape)
            nbytes, layout = head.span_nbytes, HostLayout.of(head)
        lent = self._pools.host.take(nbytes)
        call("cuMemcpyDtoHAsync", lent.address, self._addresses[index], nbytes, stream)
        return layout.at(lent)

    def to_array(self, index: int, out: DeviceArray, stream: Handle) -> None:
        """Enqueue the copy of an output, cropped to the array's shape, to a caller's array on the device."""
        tensor, address = self._tensors[index], self._addresses[index]
        itemsize = ITEM_NBYTES[tensor.dtype]
        gather = layouts.gather(out.shape, out.strides, tensor.strides)
        if gather is not None:
            self._kernels.mover(gather, itemsize).move(out.address, address, stream)
        else:
            copy_rows((out.address, out.strides), (address, tensor.strides), out.shape, itemsize, stream)

    def to_device(
        self,
        index: int,
        stream: Handle,
        *,
        reuse: bool,
        is_waited_for: bool,
        shape: tuple[int, ...] | None = None,
    ) -> DeviceOutput:
        """As `to_host`, on the device: a new array, or with ``reuse`` a view of the program's own memory.

        ``is_waited_for``: whether the caller gets the output once ``stream`` has ended.
        """
        tensor, nbytes = self._tensors[index], self._nbytes[index]
        if shape is not None:
            tensor = padding.head(tensor, shape)
            nbytes = tensor.span_nbytes
        lent = None
        if not reuse and nbytes:
            lent = self._pools.device.take(nbytes, stream, is_shared=not is_waited_for)
            call("cuMemcpyDtoDAsync", lent.address, self._addresses[index], nbytes, stream)
        return self._output(index, tensor, lent)

    def lend_host(self) -> list[Lent | None]:
        """New page-locked memory for each output; None for an empty one."""
        return [self._pools.host.take(nbytes) if nbytes else None for nbytes in self._nbytes]

    def lend_device(self, stream: Handle) -> list[Lent | None]:
        """New device memory for each output, for work on ``stream`` that is waited for; None for an empty one."""
        return [self._pools.device.take(nbytes, stream, is_shared=False) if nbytes else None for nbytes in self._nbytes]

    def download(self, lent: Sequence[Lent | None], stream: Handle) -> None:
        """Enqueue the copy of each output to memory of `lend_host`."""
        self._enqueue("cuMemcpyDtoHAsync", lent, stream)

    def copy(self, lent: Sequence[Lent | None], stream: Handle) -> None:
        """Enqueue the copy of each output to memory of `lend_device`."""
        self._enqueue("cuMemcpyDtoDAsync", lent, stream)

    def _enqueue(self, api: str, lent: Sequence[Lent | None], stream: Handle) -> None:
        for to, source, nbytes in zip(lent, self._addresses, self._nbytes, strict=True):
            if to is not None:
                call(api, to.address, source, nbytes, stream)

    def downloads(self, lent: Sequence[Lent | None]) -> list[Step]:
        """`download` as nodes of a graph."""
        return self._steps(graph.add_download, lent)

    def copies(self, lent: Sequence[Lent | None]) -> list[Step]:
        """`copy` as nodes of a graph."""
        return self._steps(graph.add_copy, lent)

    def _steps(self, add: Callable[..., Handle], lent: Sequence[Lent | None]) -> list[Step]:
        return [
            partial(add, dst=to.address, src=source, nbytes=nbytes)
            for to, source, nbytes in zip(lent, self._addresses, self._nbytes, strict=True)
            if to is not None
        ]

    def on_host(self, lent: Sequence[Lent | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """The outputs by name, as arrays over memory of `lend_host`."""
        results: dict[str, np.ndarray | DeviceOutput] = {}
        for index, (tensor, memory) in enumerate(zip(self._tensors, lent, strict=True)):
            results[tensor.name] = self._staging.views[index] if memory is None else self._layouts[index].at(memory)
        return results

    def on_device(self, lent: Sequence[Lent | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """The outputs by name, as arrays over memory of `lend_device`."""
        results: dict[str, np.ndarray | DeviceOutput] = {}
        for index, (tensor, memory) in enumerate(zip(self._tensors, lent, strict=True)):
            results[tensor.name] = self._output(index, tensor, memory)
        return results

    def _output(self, index: int, tensor: Tensor, lent: Lent | None) -> DeviceOutput:
        """An output in lent memory, or in the program's own."""
        address = self._addresses[index] if lent is None else lent.address
        return DeviceOutput(self._array(tensor, tensor.strides, address, lent))

    def empty(self, tensor: Tensor, stream: Handle) -> DeviceArray:
        """A new array for an output, C-contiguous."""
        lent = self._pools.device.take(prod(tensor.shape) * ITEM_NBYTES[tensor.dtype], stream)
        return self._array(tensor, layouts.dense_strides(tensor.shape), lent.address, lent)

    def _array(self, tensor: Tensor, strides: tuple[int, ...], address: int, owner: Lent | None) -> DeviceArray:
        return DeviceArray(
            address=address,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=strides,
            device=self._pools.ordinal,
            owner=owner,
        )


def _fill(address: int, tensor: Tensor, stream: Handle) -> None:
    """Fill all of an input with its padding value."""
    value, nbytes = padding.filling(tensor), tensor.span_nbytes
    if not value:
        call("cuMemsetD8Async", address, 0, nbytes, stream)
        return
    words = np.array(value, numpy_dtype(tensor.dtype)).reshape(1).view(f"u{min(ITEM_NBYTES[tensor.dtype], 4)}")
    pitch = ITEM_NBYTES[tensor.dtype]
    for position, word in enumerate(words.tolist()):
        bits = 8 * words.itemsize
        call(f"cuMemsetD2D{bits}Async", address + position * 4, pitch, word, 1, nbytes // pitch, stream)


def _remembered(known: dict[_K, _T], strides: _K, found: _T) -> _T:
    """Remember what was found for these strides; forget all others once there are too many."""
    if len(known) >= _MOST_LAYOUTS:
        known.clear()
    known[strides] = found
    return found
