"""Transfers between arrays of the caller and the inputs and outputs of a program on a GPU.

A host array is copied to page-locked memory in its own layout and uploaded; if its axes are in another order than the
program's, a kernel permutes them on the device. An array on the GPU is copied or permuted there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.arrays.dlpack import DeviceArray
from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, call
from nimblert.cuda.graph import Step
from nimblert.cuda.memory import BlockPool, DeviceMemory, HostLayout, PooledBlock, Staging, allocate
from nimblert.cuda.movers import GatherKernels, Mover, PaddingMover, RowMover
from nimblert.cuda.uploader import Upload, Uploader
from nimblert.plan import ITEM_NBYTES, Tensor
from nimblert.plan.dimensions import Shapes

_LARGE_NBYTES = 1 << 20
"""Larger host arrays are read in place if they are page-locked, else copied by several threads."""

_BY_KERNEL_NBYTES = 1 << 19
"""Copies of a graph between the host and the GPU are made by kernels up to this size, by the copy engine above: with a
program of 205 us on an H200, a kernel saves 10 of the 22 us that the copy engine adds."""

_COPIED_NBYTES = 1 << 16
"""Outputs up to this size are downloaded to page-locked memory that each call overwrites, and copied from there."""


@dataclass(frozen=True, slots=True)
class HostInput:
    """How host arrays of one layout get into an input: to ``staged``, page-locked memory, and then to the device.

    ``host`` is the address of ``staged``. ``mover`` permutes what was uploaded to ``landing`` into ``target``; without
    one, that is the target. ``padding`` fills what an array of a smaller shape leaves; it is None for other arrays.
    ``is_plain``: the bytes of an array are uploaded in their order in memory.
    """

    staged: np.ndarray
    host: int
    landing: int
    nbytes: int
    target: int
    mover: Mover | None = None
    padding: int | None = None
    is_plain: bool = False

    @property
    def is_large(self) -> bool:
        """Whether arrays are read in place or copied by several threads, see `enqueue`."""
        return self.is_plain and self.nbytes > _LARGE_NBYTES

    def fill(self, array: np.ndarray) -> None:
        """Copy an array to the page-locked memory."""
        if self.padding is None:
            np.copyto(self.staged, array)
        else:
            layouts.place(self.staged, array, self.padding)

    def enqueue(self, array: np.ndarray, stream: Handle, uploader: Uploader, *, in_place: bool) -> None:
        """Enqueue the transfer of an array. ``in_place``: it may be read where it is, as the caller waits for that."""
        if self.is_large:
            address = page_locked(array) if in_place else None
            if address is None:
                uploader.enqueue([Upload(self.landing, layouts.in_memory_order(array).view(np.uint8))], stream)
            else:
                call("cuMemcpyHtoDAsync", self.landing, address, self.nbytes, stream)
        elif self.nbytes:
            self.fill(array)
            call("cuMemcpyHtoDAsync", self.landing, self.host, self.nbytes, stream)
        if self.mover is not None:
            self.mover.move(self.target, self.landing, stream)

    def steps(self, kernels: GatherKernels) -> list[Step]:
        """Return the nodes of a graph that transfer what `fill` has copied."""
        if not self.nbytes:
            return []
        add = _crossing(kernels, graph.add_upload)
        uploaded: Step = partial(add, dst=self.landing, src=self.host, nbytes=self.nbytes)
        return [uploaded, *([] if self.mover is None else self.mover.steps(self.target, self.landing))]


@dataclass(frozen=True, slots=True)
class DeviceInput:
    """How arrays of one layout on the GPU get into an input, which lies at ``target``."""

    mover: Mover
    target: int

    def enqueue(self, address: int, stream: Handle) -> None:
        """Enqueue the copy of an array at ``address``."""
        self.mover.move(self.target, address, stream)

    def steps(self, address: int) -> list[Step]:
        """Return what `enqueue` does as nodes of a graph."""
        return self.mover.steps(self.target, address)


InputTransfer: TypeAlias = HostInput | DeviceInput


class InputTransfers:
    """Makes the transfers into the inputs of a program. ``staging`` is page-locked memory that mirrors them."""

    def __init__(
        self,
        context: Context,
        tensors: Sequence[Tensor],
        memory: DeviceMemory,
        staging: Staging,
        kernels: GatherKernels,
    ) -> None:
        self._context, self._tensors, self._memory = context, tensors, memory
        self._staging, self._kernels = staging, kernels
        self._landings: dict[tuple[int, str], int] = {}

    def moved(self, memory: DeviceMemory) -> None:
        """Transfer to the inputs in this memory from now on."""
        self._memory = memory

    def prepare(self, index: int, array: np.ndarray | DeviceArray) -> InputTransfer:
        """Return the transfer of arrays like this one, of the dtype of input ``index``.

        An array of a smaller shape fills the start of the input along each axis, and the rest is padded. Raises
        InputError where an array on the GPU has a layout that no kernel can copy.
        """
        tensor = self._tensors[index]
        target = self._memory.address(tensor.pointer)
        if isinstance(array, DeviceArray):
            if array.shape == tensor.shape:
                return DeviceInput(self._kernels.mover_to("input", tensor, array.strides), target)
            landing = partial(self._landing, index, "permuted")
            return DeviceInput(PaddingMover(self._kernels, tensor, array.shape, array.strides, landing), target)
        memory, host = self._staging.bytes_of(index)
        view = self._staging.views[index]
        if array.shape != tensor.shape:
            fill = layouts.filling(tensor)
            return HostInput(view, host, target, tensor.span_nbytes, target, padding=fill)
        is_dense = layouts.is_dense(array.shape, array.strides, array.itemsize)
        elements = layouts.element_strides(array) if is_dense else layouts.dense_strides(array.shape)
        gather = layouts.gather(tensor.shape, tensor.strides, elements)
        if gather is None:  # the program reads it with gaps
            return HostInput(view, host, target, tensor.span_nbytes, target)
        strides = [stride * array.itemsize for stride in elements]
        staged = np.ndarray(array.shape, array.dtype, memory, strides=strides)
        if gather.is_copy:
            return HostInput(staged, host, target, array.nbytes, target, is_plain=is_dense)
        mover = self._kernels.mover(gather, array.itemsize)
        landing_at = self._landing(index, "uploaded")
        return HostInput(staged, host, landing_at, array.nbytes, target, mover, is_plain=is_dense)

    def _landing(self, index: int, state: str) -> int:
        """Return device memory for an array before it is permuted or padded into an input, one per ``state``."""
        if (index, state) not in self._landings:
            tensor = self._tensors[index]
            self._landings[index, state] = allocate(self._context, prod(tensor.shape) * ITEM_NBYTES[tensor.dtype])
        return self._landings[index, state]


class OutputTransfers:
    """Makes the transfers of the outputs of a program, whose tensors may be cropped.

    ``staging`` is page-locked memory that mirrors them; blocks for callers come from the pools of the host and of the
    GPU ``device``.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        memory: DeviceMemory,
        staging: Staging,
        kernels: GatherKernels,
        pools: tuple[BlockPool, BlockPool],
        device: int,
    ) -> None:
        self.tensors, self._memory, self._staging, self._kernels = tensors, memory, staging, kernels
        self._pools, self._device = pools, device
        self._host_pool, self._device_pool = pools
        self.addresses = [memory.address(tensor.pointer) for tensor in tensors]
        self.nbytes = [tensor.span_nbytes for tensor in tensors]
        self._views = [layouts.strided(staging.bytes_of(index)[0], tensor) for index, tensor in enumerate(tensors)]
        self._layouts = [HostLayout.of(tensor) for tensor in tensors]
        self._is_small = [nbytes <= _COPIED_NBYTES for nbytes in self.nbytes]

    def cropped(self, shapes: Shapes) -> "OutputTransfers":
        """Return the transfers of the outputs cropped to these shapes."""
        heads = [layouts.head(tensor, shape) for tensor, shape in zip(self.tensors, shapes, strict=True)]
        return OutputTransfers(heads, self._memory, self._staging, self._kernels, self._pools, self._device)

    def small_downloads(self) -> list[Step]:
        """Return the nodes of a graph that download the small outputs to staging memory."""
        add = _crossing(self._kernels, graph.add_download)
        return [
            partial(add, dst=self._staging.bytes_of(index)[1], src=address, nbytes=nbytes)
            for index, (address, nbytes) in enumerate(zip(self.addresses, self.nbytes, strict=True))
            if nbytes and self._is_small[index]
        ]

    def enqueue_small(self, stream: Handle) -> None:
        """Enqueue what `small_downloads` does."""
        for index, is_small in enumerate(self._is_small):
            if is_small:
                self._staging.download(index, stream)

    def enqueue_large(self, stream: Handle) -> list[np.ndarray | None]:
        """Enqueue the downloads of the large outputs, and return new arrays for them; None for small ones."""
        # Every block is there before the first download: where there is no memory for one, none returns to the pool
        # while the GPU writes into it.
        pairs = zip(self.nbytes, self._is_small, strict=True)
        blocks = [None if is_small else self._host_pool.take(nbytes) for nbytes, is_small in pairs]
        return [None if block is None else self._download(i, block, stream) for i, block in enumerate(blocks)]

    def _download(self, index: int, block: PooledBlock, stream: Handle) -> np.ndarray:
        call("cuMemcpyDtoHAsync", block.address, self.addresses[index], self.nbytes[index], stream)
        return self._layouts[index].over(block)

    def on_host(self, large: Sequence[np.ndarray | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """Return the outputs by name once they are downloaded, the small ones as copies."""
        return {
            tensor.name: view.copy(order="K") if array is None else array
            for tensor, view, array in zip(self.tensors, self._views, large, strict=True)
        }

    def staged(self, index: int, stream: Handle) -> np.ndarray:
        """Enqueue the download of an output to staging memory, and return a view of that."""
        self._staging.download(index, stream)
        return self._views[index]

    def to_host(self, index: int, stream: Handle) -> np.ndarray:
        """Enqueue the download of an output to a new array."""
        if not self.nbytes[index]:
            return self._views[index]
        return self._download(index, self._host_pool.take(self.nbytes[index]), stream)

    def to_array(self, index: int, out: DeviceArray, stream: Handle) -> None:
        """Enqueue the copy of an output to a caller's array on the device."""
        if not self.nbytes[index]:
            return
        tensor, address = self.tensors[index], self.addresses[index]
        itemsize = ITEM_NBYTES[tensor.dtype]
        gather = layouts.gather(out.shape, out.strides, tensor.strides)
        if gather is not None:
            self._kernels.mover(gather, itemsize).move(out.address, address, stream)
        else:
            RowMover(out.shape, out.strides, tensor.strides, itemsize).move(out.address, address, stream)

    def take_blocks(self, stream: Handle) -> list[PooledBlock | None]:
        """Return device memory for each output, for work on ``stream``; None for an empty one."""
        return [self._device_pool.take(nbytes, stream) if nbytes else None for nbytes in self.nbytes]

    def enqueue_copies(self, blocks: Sequence[PooledBlock | None], stream: Handle) -> None:
        """Enqueue the copy of each output to its block."""
        for block, address, nbytes in zip(blocks, self.addresses, self.nbytes, strict=True):
            if block is not None:
                call("cuMemcpyDtoDAsync", block.address, address, nbytes, stream)

    def copy_steps(self, to: Sequence[int | None]) -> list[Step]:
        """Return the nodes of a graph that copy each output to an address; None: not that one."""
        return [
            partial(graph.add_copy, dst=address, src=source, nbytes=nbytes)
            for address, source, nbytes in zip(to, self.addresses, self.nbytes, strict=True)
            if address is not None
        ]

    def in_blocks(self, blocks: Sequence[PooledBlock | None]) -> dict[str, np.ndarray | DeviceOutput]:
        """Return the outputs by name, as arrays over the blocks."""
        return {
            tensor.name: self._output(index, blocks[index], None) for index, tensor in enumerate(self.tensors)
        }

    def to_device(
        self, index: int, stream: Handle, *, reuse: bool, precede: Callable[[int], None] | None
    ) -> DeviceOutput:
        """Enqueue the copy of an output to a new array; with ``reuse`` it is a view of the program's own memory.

        ``precede`` makes another stream wait for the output; None where the caller waits for ``stream``.
        """
        block, nbytes = None, self.nbytes[index]
        if not reuse and nbytes:
            block = self._device_pool.take(nbytes, stream)
            block.is_shared = precede is not None
            call("cuMemcpyDtoDAsync", block.address, self.addresses[index], nbytes, stream)
        return self._output(index, block, precede)

    def _output(
        self, index: int, block: PooledBlock | None, precede: Callable[[int], None] | None
    ) -> DeviceOutput:
        """Return an output in a block, or in the program's own memory."""
        tensor = self.tensors[index]
        address = self.addresses[index] if block is None else block.address
        return DeviceOutput(self._array(tensor, tensor.strides, address, block, precede))

    def empty(self, tensor: Tensor, stream: Handle, precede: Callable[[int], None] | None) -> DeviceArray:
        """Return a new array for an output, C-contiguous; ``precede`` as in `to_device`."""
        block = self._device_pool.take(prod(tensor.shape) * ITEM_NBYTES[tensor.dtype], stream)
        block.is_shared = True
        return self._array(tensor, layouts.dense_strides(tensor.shape), block.address, block, precede)

    def _array(
        self,
        tensor: Tensor,
        strides: tuple[int, ...],
        address: int,
        owner: PooledBlock | None,
        precede: Callable[[int], None] | None,
    ) -> DeviceArray:
        return DeviceArray(
            address=address,
            dtype=tensor.dtype,
            shape=tensor.shape,
            strides=strides,
            device=self._device,
            precede=precede,
            owner=owner,
        )


def _crossing(kernels: GatherKernels, engine: Callable[..., Handle]) -> Callable[..., Handle]:
    """Return a function that adds copies between host and GPU to a graph, large ones by the copy ``engine``."""

    def add(built: Handle, dst: int, src: int, nbytes: int) -> Handle:
        chosen = kernels.add_copy if nbytes <= _BY_KERNEL_NBYTES else engine
        return chosen(built, dst, src, nbytes)

    return add


def page_locked(array: np.ndarray) -> int | None:
    """Return the address by which the GPU reads a dense array in place; None for ordinary memory."""
    owner: object = array.base
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if owner is None:
        return None  # memory of numpy's own
    first = int(array.__array_interface__["data"][0])
    address, last = _device_address(first), _device_address(first + array.nbytes - 1)
    return address if address is not None and last == address + array.nbytes - 1 else None


def _device_address(address: int) -> int | None:
    attribute = driver.bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    status, *found = driver.bindings().cuPointerGetAttribute(attribute, address)
    return int(found[0]) if status == 0 else None
