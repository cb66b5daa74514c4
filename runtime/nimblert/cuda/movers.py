"""Copies between layouts on a GPU, and fills: enqueued on a stream, or as nodes of a graph."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path

from nimblert.arrays import layouts
from nimblert.arrays.layouts import Gather
from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, PackedParameters, call
from nimblert.cuda.graph import Step
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor

_PTX = Path(__file__).with_name("layout.ptx")
_BLOCK = 256
_MOST_BLOCKS = 1 << 16

_ITEMSIZES = (16, 8, 4, 2, 1)

_ADDRESSES = struct.Struct("<QQ")


class Mover(ABC):
    """Copies arrays of one layout to another on the device, or fills memory there."""

    is_copy = False
    """Whether it is one plain copy, as both layouts are the same."""

    @abstractmethod
    def move(self, to: int, source: int, stream: Handle) -> None:
        """Enqueue the copy from ``source`` to ``to``, both device addresses."""

    @abstractmethod
    def steps(self, to: int, source: int) -> list[Step]:
        """What `move` does as nodes of a graph, one after the other."""


class GatherKernels:
    """The kernels of layout.cu, compiled by the driver on first use."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @cached_property
    def _functions(self) -> dict[int, Handle]:
        text = _PTX.read_bytes() + b"\0"
        module = self._context.acquire(call("cuModuleLoadData", text), "cuModuleUnload")
        return {n: call("cuModuleGetFunction", module, f"gather_{n}".encode()) for n in _ITEMSIZES}

    def mover(self, gather: Gather, itemsize: int) -> Mover:
        """A mover for this gather, of elements of ``itemsize`` bytes."""
        return _GatherMover(None if gather.is_copy else self._functions[itemsize], gather, itemsize)

    def mover_to(self, side: str, tensor: Tensor, strides: tuple[int, ...]) -> Mover:
        """A mover from an array of the tensor's shape with these ``strides``, in elements, to the tensor.

        Raises InputError where no kernel can do it; ``side`` is the kind of tensor, for the message.
        """
        gather = layouts.gather(tensor.shape, tensor.strides, strides)
        if gather is None:
            raise InputError(f"{side} {tensor.name!r}: strides {strides} cannot be laid out on the device")
        return self.mover(gather, ITEM_NBYTES[tensor.dtype])

    def add_copy(self, built: Handle, dst: int, src: int, nbytes: int) -> Handle:
        """As `graph.add_copy`, by a kernel, which reaches page-locked memory too; not for 0 bytes.

        A kernel starts and completes with less latency than the copy engine.
        """
        itemsize = next(size for size in _ITEMSIZES if not (dst | src | nbytes) % size)
        mover = _GatherMover(self._functions[itemsize], Gather((nbytes // itemsize,), (1,)), itemsize)
        (step,) = mover.steps(dst, src)
        return step(built)


class _GatherMover(Mover):
    """Gathers by a kernel of layout.cu, or by a plain copy where both layouts are the same."""

    def __init__(self, function: Handle | None, gather: Gather, itemsize: int) -> None:
        self._function = function
        self.is_copy = function is None
        self._nbytes = gather.count * itemsize
        self._blocks = min(-(-gather.count // _BLOCK), _MOST_BLOCKS)
        self._parameters = PackedParameters(b"" if function is None else gather.parameters(0, 0))

    def move(self, to: int, source: int, stream: Handle) -> None:
        if self._function is None:
            call("cuMemcpyDtoDAsync", to, source, self._nbytes, stream)
            return
        self._parameters.replace(_ADDRESSES.pack(to, source))
        extra = self._parameters.extra
        call("cuLaunchKernel", self._function, self._blocks, 1, 1, _BLOCK, 1, 1, 0, stream, 0, extra)

    def steps(self, to: int, source: int) -> list[Step]:
        if self._function is None:
            return [partial(graph.add_copy, dst=to, src=source, nbytes=self._nbytes)]
        return [partial(self._add, to=to, source=source)]

    def _add(self, built: Handle, to: int, source: int) -> Handle:
        self._parameters.replace(_ADDRESSES.pack(to, source))
        return graph.add_kernel(built, self._function, (self._blocks, 1, 1), (_BLOCK, 1, 1), self._parameters)


class RowMover(Mover):
    """Copies from strides ``source`` to strides ``to``, in elements, by 2D copies: few where rows are contiguous."""

    def __init__(self, shape: Sequence[int], to: Sequence[int], source: Sequence[int], itemsize: int) -> None:
        given = [axis for axis in zip(to, source, shape, strict=True) if axis[2] != 1]
        backward = [axis for axis in given if axis[0] < 0]  # from whose last elements the copies begin
        to_first, source_first = (sum(axis[side] * (axis[2] - 1) for axis in backward) for side in (0, 1))
        axes = sorted(((-a, -b, size) if a < 0 else (a, b, size) for a, b, size in given), reverse=True)
        width = 1
        while axes and axes[-1][:2] == (width, width):
            width *= axes.pop()[2]
        rows = next((axis for axis in reversed(axes) if min(axis[:2]) >= width), None)
        if rows is not None:
            axes.remove(rows)
        to_pitch, source_pitch, height = rows or (width, width, 1)
        self._rows = graph.Rows(width * itemsize, height, to_pitch * itemsize, source_pitch * itemsize)
        self._offsets = [
            (
                itemsize * (to_first + sum(i * stride for i, (stride, _, _) in zip(at, axes, strict=True))),
                itemsize * (source_first + sum(i * stride for i, (_, stride, _) in zip(at, axes, strict=True))),
            )
            for at in product(*(range(size) for _, _, size in axes))
        ]

    def move(self, to: int, source: int, stream: Handle) -> None:
        """As `Mover.move`."""
        names = driver.bindings()
        params = names.CUDA_MEMCPY2D()
        params.srcMemoryType = params.dstMemoryType = names.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.WidthInBytes, params.Height, params.dstPitch, params.srcPitch = self._rows
        for to_offset, source_offset in self._offsets:
            params.dstDevice, params.srcDevice = to + to_offset, source + source_offset
            call("cuMemcpy2DAsync", params, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        """As `Mover.steps`."""
        return [
            partial(graph.add_rows, dst=to + to_offset, src=source + source_offset, rows=self._rows)
            for to_offset, source_offset in self._offsets
        ]
