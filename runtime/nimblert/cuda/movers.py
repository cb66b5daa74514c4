"""Copies between layouts on a GPU: by the kernels of layout.cu, or by a plain copy where both layouts are the same."""

import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

from nimblert.arrays import layouts
from nimblert.arrays.layouts import Gather
from nimblert.cuda import driver, graph
from nimblert.cuda.driver import Context, Handle, PackedParameters, call
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Tensor

_PTX = Path(__file__).with_name("layout.ptx")
_BLOCK = 256
_MOST_BLOCKS = 1 << 16

_ADDRESSES = struct.Struct("<QQ")


class GatherKernels:
    """The kernels of layout.cu, compiled by the driver on first use."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @cached_property
    def _functions(self) -> dict[int, Handle]:
        text = _PTX.read_bytes() + b"\0"
        module = self._context.acquire(call("cuModuleLoadData", text), "cuModuleUnload")
        return {n: call("cuModuleGetFunction", module, f"gather_{n}".encode()) for n in (1, 2, 4, 8, 16)}

    def mover(self, gather: Gather, itemsize: int) -> "Mover":
        """A mover for this gather, of elements of ``itemsize`` bytes."""
        return Mover(None if gather.is_copy else self._functions[itemsize], gather, itemsize)

    def mover_to(self, side: str, tensor: Tensor, strides: tuple[int, ...]) -> "Mover":
        """A mover from an array of the tensor's shape with these ``strides``, in elements, to the tensor.

        Raises InputError where no kernel can do it; ``side`` is the kind of tensor, for the message.
        """
        gather = layouts.gather(tensor.shape, tensor.strides, strides)
        if gather is None:
            raise InputError(f"{side} {tensor.name!r}: strides {strides} cannot be laid out on the device")
        return self.mover(gather, ITEM_NBYTES[tensor.dtype])


class Mover:
    """Copies arrays of one layout to another on the device, by a kernel, or by a plain copy if both are the same."""

    def __init__(self, function: Handle | None, gather: Gather, itemsize: int) -> None:
        self._function = function
        self._nbytes = gather.count * itemsize
        self._blocks = min(-(-gather.count // _BLOCK), _MOST_BLOCKS)
        self._parameters = PackedParameters(gather.parameters(0, 0))

    @property
    def is_copy(self) -> bool:
        """Whether both layouts are the same."""
        return self._function is None

    def move(self, to: int, source: int, stream: Handle) -> None:
        """Enqueue the copy from ``source`` to ``to``, both device addresses."""
        if self._function is None:
            call("cuMemcpyDtoDAsync", to, source, self._nbytes, stream)
            return
        self._parameters.replace(_ADDRESSES.pack(to, source))
        extra = self._parameters.extra
        call("cuLaunchKernel", self._function, self._blocks, 1, 1, _BLOCK, 1, 1, 0, stream, 0, extra)

    def add(self, built: Handle, to: int, source: int) -> Handle:
        """Add what `move` does to a graph, without edges, and return its node."""
        if self._function is None:
            return graph.add_copy(built, to, source, self._nbytes)
        self._parameters.replace(_ADDRESSES.pack(to, source))
        return graph.add_kernel(built, self._function, (self._blocks, 1, 1), (_BLOCK, 1, 1), self._parameters)


def copy_rows(
    to: tuple[int, Sequence[int]],
    source: tuple[int, Sequence[int]],
    shape: Sequence[int],
    itemsize: int,
    stream: Handle,
) -> None:
    """Copy elements on the device; both sides are an address and strides in elements. Few 2D copies do it."""
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
