"""The inputs and outputs of a program on a GPU: transfers from and to arrays on the host and on the GPU.

An array on the host is copied to page-locked memory in its own layout, in parallel where it is large, and uploaded; one
that is in page-locked memory may be uploaded from there. If its axes are in another order than the program's, a kernel
permutes them on the device. An array on the GPU is copied or permuted there.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from nimblert.arrays import dlpack, layouts, padding
from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.calls.remembering import remembered
from nimblert.cuda import graph
from nimblert.cuda.call_graphs import Arrival
from nimblert.cuda.copiers import PART_NBYTES, copied
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.early import Signal, StagedArrays, can_wait
from nimblert.cuda.graph import Step
from nimblert.cuda.memory import DeviceMemory, Staging, allocate
from nimblert.cuda.movers import GatherKernels, Mover, RowMover
from nimblert.cuda.padded import PaddingMover
from nimblert.cuda.page_locked import PageLockedArrays
from nimblert.cuda.pools import HostLayout, Lent, Pools, addresses
from nimblert.dimensions import Shapes
from nimblert.plan import ITEM_NBYTES, Tensor

_SMALL_NBYTES = 2 * PART_NBYTES
"""Larger arrays are copied by several threads, and each part is uploaded when it is complete. The inputs of calls with
more bytes are not uploaded by a graph."""

_BY_KERNEL_NBYTES = 1 << 19
"""No more is copied between the host and the GPU by kernels of a graph. With a program of 205 us on an H200 that saves
10 of the 22 us that the copy engine adds, for 301 KB to the GPU and 2 KB from there."""

_EARLY_NBYTES = 1 << 17
"""Calls with no fewer bytes of inputs are launched before these are copied to page-locked memory. On an H200 that saves
7 of 73 us with 301 KB, 19 of 132 us with 657 KB, and nothing with 128 KiB (bench/results/gpu/early_launches.json)."""

_IN_PLACE_NBYTES = 1 << 18
"""Inputs with fewer bytes are copied even if they are page-locked: the upload runs beside the copy, so that this takes
no longer (bench/results/gpu/page_locked.json)."""

_COPIED_NBYTES = 1 << 12
"""An output of a call from the host with no more bytes gets to page-locked memory that each call overwrites, and is
copied from there by the host: taking memory that the caller may keep would delay the launch."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How arrays of one layout get from the host into an input.

    An array is copied to ``staged``, page-locked memory in that layout at address ``host``, uploaded to ``device``, and
    permuted by ``mover`` unless that is None. ``is_plain``: whether ``staged`` gets its bytes as they lie in memory, so
    that the array can be uploaded in its place.
    """

    staged: np.ndarray
    host: int
    device: int
    nbytes: int
    mover: Mover | None
    is_plain: bool = False


Given: TypeAlias = tuple[tuple[Mover, int], ...]
"""Arrays on the device, one for each input: one of `Inlet.movers` and an address."""


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
        self.is_small = sum(self._nbytes) <= _SMALL_NBYTES
        """Whether a graph may upload the inputs."""
        self._staging = staging
        self._page_locked = PageLockedArrays()
        self._kernels = kernels
        self._landing: dict[tuple[int, str], int] = {}
        self._ways: list[dict[Shapes, _Way]] = [{} for _ in tensors]
        self.movers: list[dict[bytes, Mover]] = [{} for _ in tensors]
        """For each input its movers of device arrays, by `dlpack.raw_numbers` of their shape and strides."""

    def moved(self, memory: DeviceMemory) -> None:
        """Transfer to the inputs in this memory from now on."""
        self._addresses = [memory.address(tensor.pointer) for tensor in self._tensors]
        self._ways = [{} for _ in self._tensors]

    def put(self, index: int, array: np.ndarray | DeviceArray, stream: Handle, *, in_place: bool) -> None:
        """Enqueue the transfer of an array into input ``index``, whose dtype it has.

        An array of a smaller shape fills the start of the input along each axis, and the rest is padded. ``in_place``:
        the caller waits for the transfer, so that an array in page-locked memory need not be copied before.
        """
        if not self._nbytes[index]:
            return
        if isinstance(array, DeviceArray):
            self._mover_of(index, array).move(self._addresses[index], array.address, stream)
            return
        if array.shape != self._tensors[index].shape and array.nbytes <= _SMALL_NBYTES:
            padding.place(self._staging.views[index], array, padding.filling(self._tensors[index]))
            self._staging.upload(index, stream)
            return
        way = self._way_of(index, array)
        self._upload(way, array, stream, in_place=in_place)
        if way.mover is not None:
            way.mover.move(self._addresses[index], way.device, stream)

    def uploads(self, arrays: Sequence[np.ndarray], signal: Signal | None) -> tuple[list[Arrival], StagedArrays]:
        """The transfers of host arrays with the layouts of these, as nodes of a graph, and where these read them.

        With a ``signal`` they wait until the arrays are there.
        """
        found = []
        staged = StagedArrays(signal, self._in_place)
        for index, array in enumerate(arrays):
            way = self._way_of(index, array)
            first = staged.add(way.staged, way.host, way.nbytes, is_plain=way.is_plain)
            add: Callable[..., Handle] = _crossing(self._kernels, graph.add_upload)
            if signal is not None:
                add = partial(signal.add_upload, index=index, first=first)
            steps: list[Step] = [partial(add, dst=way.device, src=way.host, nbytes=way.nbytes)]
            if way.mover is not None:
                steps += way.mover.steps(self._addresses[index], way.device)
            found.append(Arrival(steps))
        return found, staged

    def may_be_early(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether it is worth while, and possible, to launch calls with arrays like these before their uploads."""
        ways = [self._way_of(index, array) for index, array in enumerate(arrays)]
        return sum(way.nbytes for way in ways) >= _EARLY_NBYTES and all(can_wait(way.device, way.host) for way in ways)

    def moves(self, arrays: Given) -> list[Arrival]:
        """The transfers of device arrays as nodes of a graph."""
        return [
            Arrival(mover.steps(to, address)) for (mover, address), to in zip(arrays, self._addresses, strict=True)
        ]

    def move(self, arrays: Given, stream: Handle) -> None:
        """Enqueue the transfer of a device array into every input."""
        for (mover, address), to in zip(arrays, self._addresses, strict=True):
            mover.move(to, address, stream)

    def _mover_of(self, index: int, array: DeviceArray) -> Mover:
        layout = dlpack.raw_numbers((*array.shape, *array.strides))
        mover = self.movers[index].get(layout)
        return mover or remembered(self.movers[index], layout, self._mover(index, array))

    def _mover(self, index: int, array: DeviceArray) -> Mover:
        tensor = self._tensors[index]
        if array.shape == tensor.shape:
            return self._kernels.mover_to("input", tensor, array.strides)
        return self._padding_mover(index, array.shape, array.strides)

    def _padding_mover(self, index: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Mover:
        landing = partial(self._landing_of, index, "permuted")
        return PaddingMover(self._kernels, self._tensors[index], shape, strides, landing)

    def _way_of(self, index: int, array: np.ndarray) -> _Way:
        way = self._ways[index].get((array.shape, array.strides))
        if way is not None:
            return way
        is_dense = layouts.is_dense(array.shape, array.strides, array.itemsize)
        dense = array if is_dense else np.ascontiguousarray(array)
        made = self._way(index, dense) if array.shape == self._tensors[index].shape else self._padded_way(index, dense)
        made = replace(made, is_plain=is_dense and made.staged.strides == array.strides)
        return remembered(self._ways[index], (array.shape, array.strides), made)

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
        return _Way(staged, host, self._landing_of(index, "uploaded"), array.nbytes, mover)

    def _padded_way(self, index: int, array: np.ndarray) -> _Way:
        """Of a dense array of a smaller shape."""
        memory, host = self._staging.bytes_of(index)
        dense = layouts.dense_like(array.shape, self._tensors[index].strides)
        strides = layouts.element_strides(array)
        if layouts.gather(array.shape, dense, strides) is None:  # then it is permuted on the host
            strides = dense
        staged = np.ndarray(array.shape, array.dtype, memory, strides=[stride * array.itemsize for stride in strides])
        mover = self._padding_mover(index, array.shape, strides)
        return _Way(staged, host, self._landing_of(index, "uploaded"), array.nbytes, mover)

    def _landing_of(self, index: int, state: str) -> int:
        """Device memory for an array before it is permuted or padded into an input; each ``state`` has its own."""
        if (index, state) not in self._landing:
            tensor = self._tensors[index]
            self._landing[index, state] = allocate(self._context, prod(tensor.shape) * ITEM_NBYTES[tensor.dtype])
        return self._landing[index, state]

    def _in_place(self, array: np.ndarray) -> int | None:
        """The address by which the GPU can read a dense array; None where it is to be copied."""
        if array.nbytes < _IN_PLACE_NBYTES:
            return None
        address = self._page_locked.address(array)
        return None if address is None or self._staging.holds(address) else address

    def _upload(self, way: _Way, array: np.ndarray, stream: Handle, *, in_place: bool) -> None:
        if way.is_plain and in_place and self._in_place(array) is not None:
            call("cuMemcpyHtoDAsync", way.device, array.ctypes.data, way.nbytes, stream)
        elif way.is_plain and way.nbytes > _SMALL_NBYTES:
            to, source = (layouts.in_memory_order(each).view(np.uint8) for each in (way.staged, array))
            with closing(copied(to, source)) as parts:
                for start in parts:
                    nbytes = min(PART_NBYTES, way.nbytes - start)
                    call("cuMemcpyHtoDAsync", way.device + start, way.host + start, nbytes, stream)
        else:
            np.copyto(way.staged, array)
            call("cuMemcpyHtoDAsync", way.device, way.host, way.nbytes, stream)


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
        self._views = [_cropped(view, t.shape) for view, t in zip(staging.views, tensors, strict=True)]
        sized = zip(tensors, self._views, self._nbytes, strict=True)
        self._copied = [(tensor.name, view) for tensor, view, nbytes in sized if nbytes <= _COPIED_NBYTES]
        self._memory = memory
        self._staging = staging
        self._kernels = kernels
        self._pools = pools
        self._heads: dict[Shapes, Outlet] = {}

    @property
    def shapes(self) -> Shapes:
        """The shapes of the outputs."""
        return tuple(tensor.shape for tensor in self._tensors)

    def cropped(self, shapes: Shapes) -> "Outlet":
        """The transfers of the outputs cropped to these shapes."""
        found = self._heads.get(shapes)
        if found is not None:
            return found
        heads = [padding.head(tensor, shape) for tensor, shape in zip(self._tensors, shapes, strict=True)]
        made = Outlet(heads, self._memory, self._staging, self._kernels, self._pools)
        return remembered(self._heads, shapes, made)

    def moved(self, memory: DeviceMemory) -> None:
        """Transfer from the outputs in this memory from now on."""
        self._memory = memory
        self._addresses = [memory.address(tensor.pointer) for tensor in self._tensors]
        self._heads.clear()

    def to_host(self, index: int, stream: Handle, *, reuse: bool) -> np.ndarray:
        """Enqueue the download of an output, and return the array that then holds it.

        It is new, or with ``reuse`` a view of memory that the next run overwrites.
        """
        if reuse or not self._nbytes[index]:
            self._staging.download(index, stream)
            return self._views[index]
        lent = self._pools.host.take(self._nbytes[index], stream, is_shared=False)
        call("cuMemcpyDtoHAsync", lent.address, self._addresses[index], self._nbytes[index], stream)
        return self._layouts[index].at(lent)

    def to_array(self, index: int, out: DeviceArray, stream: Handle) -> None:
        """Enqueue the copy of an output to a caller's array on the device."""
        if not self._nbytes[index]:
            return
        tensor, address = self._tensors[index], self._addresses[index]
        itemsize = ITEM_NBYTES[tensor.dtype]
        gather = layouts.gather(out.shape, out.strides, tensor.strides)
        if gather is not None:
            self._kernels.mover(gather, itemsize).move(out.address, address, stream)
        else:
            RowMover(out.shape, out.strides, tensor.strides, itemsize).move(out.address, address, stream)

    def to_device(
        self, index: int, stream: Handle, *, reuse: bool, precede: Callable[[int], None] | None
    ) -> DeviceOutput:
        """As `to_host`, on the device: a new array, or with ``reuse`` a view of the program's own memory.

        ``precede``: see `DeviceArray`; None where the caller gets the output once ``stream`` has ended.
        """
        lent, nbytes = None, self._nbytes[index]
        if not reuse and nbytes:
            lent = self._pools.device.take(nbytes, stream, is_shared=precede is not None)
            call("cuMemcpyDtoDAsync", lent.address, self._addresses[index], nbytes, stream)
        return self._output(index, self._tensors[index], lent, precede)

    def lend_host(self) -> list[Lent | None]:
        """New page-locked memory for each output; None for a small one, which uses the program's own."""
        take = self._pools.host.take
        return [None if nbytes <= _COPIED_NBYTES else take(nbytes, None, is_shared=False) for nbytes in self._nbytes]

    def on_host(self, lent: Sequence[Lent | None]) -> list[int | None]:
        """The address in memory of `lend_host` of each output; None for an empty one."""
        own = [self._staging.bytes_of(index)[1] if nbytes else None for index, nbytes in enumerate(self._nbytes)]
        return [address if memory is None else memory.address for memory, address in zip(lent, own, strict=True)]

    def lend_device(self, stream: Handle) -> list[Lent | None]:
        """New device memory for each output, for work on ``stream`` that is waited for; None for an empty one."""
        return [self._pools.device.take(nbytes, stream, is_shared=False) if nbytes else None for nbytes in self._nbytes]

    def download(self, lent: Sequence[Lent | None], stream: Handle) -> None:
        """Enqueue the copy of each output to memory of `lend_host`."""
        self._enqueue("cuMemcpyDtoHAsync", self.on_host(lent), stream)

    def copy(self, lent: Sequence[Lent | None], stream: Handle) -> None:
        """Enqueue the copy of each output to memory of `lend_device`."""
        self._enqueue("cuMemcpyDtoDAsync", addresses(lent), stream)

    def _enqueue(self, api: str, to: Sequence[int | None], stream: Handle) -> None:
        for address, source, nbytes in zip(to, self._addresses, self._nbytes, strict=True):
            if address is not None:
                call(api, address, source, nbytes, stream)

    def downloads(self, to: Sequence[int | None]) -> list[Step]:
        """The copy of each output to an address in page-locked memory, as nodes of a graph; None: not that one."""
        return self._steps(_crossing(self._kernels, graph.add_download), to)

    def copies(self, to: Sequence[int | None]) -> list[Step]:
        """As `downloads`, to memory of the GPU."""
        return self._steps(graph.add_copy, to)

    def _steps(self, add: Callable[..., Handle], to: Sequence[int | None]) -> list[Step]:
        return [
            partial(add, dst=address, src=source, nbytes=nbytes)
            for address, source, nbytes in zip(to, self._addresses, self._nbytes, strict=True)
            if address is not None
        ]

    def arrays(self, lent: Sequence[Lent | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """The outputs by name, as arrays over memory of `lend_host`; see `copy_small`."""
        results: dict[str, np.ndarray | DeviceOutput] = {}
        for index, (tensor, memory) in enumerate(zip(self._tensors, lent, strict=True)):
            results[tensor.name] = self._views[index] if memory is None else self._layouts[index].at(memory)
        return results

    def copy_small(self, results: dict[str, np.ndarray | DeviceOutput]) -> None:
        """Have the small outputs of `arrays`, which the next call overwrites, be the caller's own."""
        for name, view in self._copied:
            results[name] = view.copy(order="K")

    def on_device(self, lent: Sequence[Lent | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """The outputs by name, as arrays over memory of `lend_device`."""
        results: dict[str, np.ndarray | DeviceOutput] = {}
        for index, (tensor, memory) in enumerate(zip(self._tensors, lent, strict=True)):
            results[tensor.name] = self._output(index, tensor, memory)
        return results

    def _output(
        self, index: int, tensor: Tensor, lent: Lent | None, precede: Callable[[int], None] | None = None
    ) -> DeviceOutput:
        """An output in lent memory, or in the program's own."""
        address = self._addresses[index] if lent is None else lent.address
        return DeviceOutput(self._array(tensor, tensor.strides, address, lent, precede))

    def empty(self, tensor: Tensor, stream: Handle, precede: Callable[[int], None] | None) -> DeviceArray:
        """A new array for an output, C-contiguous; ``precede`` as in `to_device`."""
        lent = self._pools.device.take(prod(tensor.shape) * ITEM_NBYTES[tensor.dtype], stream, is_shared=True)
        return self._array(tensor, layouts.dense_strides(tensor.shape), lent.address, lent, precede)

    def _array(
        self,
        tensor: Tensor,
        strides: tuple[int, ...],
        address: int,
        owner: Lent | None,
        precede: Callable[[int], None] | None,
    ) -> DeviceArray:
        return DeviceArray(
            address=address,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=strides,
            device=self._pools.ordinal,
            precede=precede,
            owner=owner,
        )


def _crossing(kernels: GatherKernels, engine: Callable[..., Handle]) -> Callable[..., Handle]:
    """Adds copies between host and GPU to a graph: small ones by a kernel, larger ones by the copy ``engine``."""

    def add(built: Handle, dst: int, src: int, nbytes: int) -> Handle:
        chosen = kernels.add_copy if nbytes <= _BY_KERNEL_NBYTES else engine
        return chosen(built, dst, src, nbytes)

    return add


def _cropped(view: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return view if view.shape == shape else view[tuple(map(slice, shape))]
