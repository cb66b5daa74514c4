"""Copies between layouts on a GPU, and fills: enqueued on a stream, or as nodes of a graph."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.layouts import Gather, numpy_dtype
from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, PackedParameters, call
from nimblert.cuda.graph import Filling, Step
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor

_PTX = Path(__file__).with_name("layout.ptx")
_BLOCK = 256
_MOST_BLOCKS = 1 << 16

_ITEMSIZES = (16, 8, 4, 2, 1)

_ADDRESSES = struct.Struct("<QQ")

_NOTHING = Gather((0,), (1,))
"""Of arrays without elements, whose strides may be any."""


class Mover(ABC):
    """Copies arrays of one layout to another on the device, or fills memory there."""

    is_copy = False
    """Whether it is one plain copy, as both layouts are the same."""

    @abstractmethod
    def move(self, to: int, source: int, stream: Handle) -> None:
        """Enqueue the copy from ``source`` to ``to``, both device addresses."""

    @abstractmethod
    def steps(self, to: int, source: int) -> list[Step]:
        """Return what `move` does as nodes of a graph, one after the other."""


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
        """Return a mover for this gather, of elements of ``itemsize`` bytes."""
        return _GatherMover(None if gather.is_copy else self._functions[itemsize], gather, itemsize)

    def mover_to(self, side: str, tensor: Tensor, strides: tuple[int, ...]) -> Mover:
        """Return a mover from an array of the tensor's shape with these ``strides``, in elements, to the tensor.

        Raises InputError where no kernel can do it; ``side`` is the kind of tensor, for the message.
        """
        gather = layouts.gather(tensor.shape, tensor.strides, strides) if tensor.span_nbytes else _NOTHING
        if gather is None:
            raise InputError(f"{side} {tensor.name!r}: strides {strides} cannot be laid out on the device")
        return self.mover(gather, ITEM_NBYTES[tensor.dtype])

    def add_copy(self, built: Handle, dst: int, src: int, nbytes: int) -> Handle:
        """Add a copy of 1 byte or more by a kernel, which reaches page-locked memory too.

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
        if not self._nbytes:
            return
        if self._function is None:
            call("cuMemcpyDtoDAsync", to, source, self._nbytes, stream)
            return
        self._parameters.replace(_ADDRESSES.pack(to, source))
        extra = self._parameters.extra
        call("cuLaunchKernel", self._function, self._blocks, 1, 1, _BLOCK, 1, 1, 0, stream, 0, extra)

    def steps(self, to: int, source: int) -> list[Step]:
        if not self._nbytes:
            return []
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
        # Negative strides start at the last element.
        backward = [axis for axis in given if axis[0] < 0]
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
        """Move as `Mover.move` says."""
        names = driver.bindings()
        params = names.CUDA_MEMCPY2D()
        params.srcMemoryType = params.dstMemoryType = names.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.WidthInBytes, params.Height, params.dstPitch, params.srcPitch = self._rows
        for to_offset, source_offset in self._offsets:
            params.dstDevice, params.srcDevice = to + to_offset, source + source_offset
            call("cuMemcpy2DAsync", params, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        """Return the steps as `Mover.steps` says."""
        return [
            partial(graph.add_rows, dst=to + to_offset, src=source + source_offset, rows=self._rows)
            for to_offset, source_offset in self._offsets
        ]


_WORD_NBYTES = 4
"""The largest element of a fill."""


class PaddingMover(Mover):
    """Copies arrays of a ``shape`` with these ``strides``, in elements, to the start of an input, and fills the rest.

    The program, or calls of other sizes, may have written the rest since the last call, so that each fills it again.
    ``landing`` gives device memory of the input's size. Raises InputError where no kernel can lay out such an array.
    """

    def __init__(
        self,
        kernels: GatherKernels,
        tensor: Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        landing: Callable[[], int],
    ) -> None:
        self._parts: list[Mover] = list(_fills(tensor, shape))
        itemsize = ITEM_NBYTES[tensor.dtype]
        whole = layouts.gather(shape, tensor.strides, strides)
        if whole is not None:
            self._parts.append(kernels.mover(whole, itemsize))
            return
        dense = layouts.dense_like(shape, tensor.strides)
        gather = layouts.gather(shape, dense, strides)
        if gather is None:
            raise InputError(f"input {tensor.name!r}: strides {strides} cannot be laid out on the device")
        rows = RowMover(shape, tensor.strides, dense, itemsize)
        if gather.is_copy:
            self._parts.append(rows)
        else:
            landed = landing()
            self._parts += [_Redirected(kernels.mover(gather, itemsize), to=landed), _Redirected(rows, source=landed)]

    def move(self, to: int, source: int, stream: Handle) -> None:
        """Move as `Mover.move` says."""
        for part in self._parts:
            part.move(to, source, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        """Return the steps as `Mover.steps` says."""
        return [step for part in self._parts for step in part.steps(to, source)]


class _Redirected(Mover):
    """A mover to or from a fixed address."""

    def __init__(self, mover: Mover, *, to: int | None = None, source: int | None = None) -> None:
        self._mover, self._to, self._source = mover, to, source

    def _ends(self, to: int, source: int) -> tuple[int, int]:
        return to if self._to is None else self._to, source if self._source is None else self._source

    def move(self, to: int, source: int, stream: Handle) -> None:
        self._mover.move(*self._ends(to, source), stream)

    def steps(self, to: int, source: int) -> list[Step]:
        return self._mover.steps(*self._ends(to, source))


@dataclass(frozen=True, slots=True)
class _Fill(Mover):
    """Fills memory ``offset`` bytes after the destination; there is no source."""

    offset: int
    filling: Filling

    def move(self, to: int, source: int, stream: Handle) -> None:
        del source
        value, itemsize, width, height, pitch = self.filling
        call(f"cuMemsetD2D{8 * itemsize}Async", to + self.offset, pitch, value, width, height, stream)

    def steps(self, to: int, source: int) -> list[Step]:
        del source
        return [partial(graph.add_fill, dst=to + self.offset, filling=self.filling)]


def _fills(tensor: Tensor, shape: Sequence[int]) -> Iterator[_Fill]:
    """Yield fills of at least the elements of an input beyond ``shape`` with its padding value."""
    itemsize = ITEM_NBYTES[tensor.dtype]
    words = _words(layouts.filling(tensor), tensor)
    size = min(itemsize, _WORD_NBYTES)
    # Each word of an element is a row.
    if len(set(words)) > 1:
        count = tensor.span_nbytes // itemsize
        for position, word in enumerate(words):
            yield _Fill(position * size, Filling(word, size, 1, count, itemsize))
    elif not layouts.is_dense(tensor.shape, tensor.strides):
        yield _Fill(0, Filling(words[0], size, tensor.span_nbytes // size))
    else:
        for given, whole, stride in zip(shape, tensor.shape, tensor.strides, strict=True):
            if given < whole:
                start, width, pitch = given * stride, (whole - given) * stride, whole * stride
                height = prod(tensor.shape) // pitch
                yield _Fill(start * itemsize, Filling(words[0], size, width * len(words), height, pitch * itemsize))


def _words(value: int, tensor: Tensor) -> list[int]:
    """Return the bits of an element of this value, in words of at most 4 bytes."""
    itemsize = ITEM_NBYTES[tensor.dtype]
    # A zero is all zero bits, also in bfloat16, which numpy lacks.
    if not value:
        return [0] * -(-itemsize // _WORD_NBYTES)
    element = np.array(value, numpy_dtype(tensor.dtype)).reshape(1)
    words: list[int] = element.view(f"u{min(itemsize, _WORD_NBYTES)}").tolist()
    return words
