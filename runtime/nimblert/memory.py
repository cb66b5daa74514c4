"""Device memory of a program: one allocation for each region, the inputs and outputs packed."""

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

import numpy as np

from nimblert.driver import Context, call
from nimblert.dtypes import numpy_dtype
from nimblert.plan import Plan, Pointer, Program, Region, Tensor, Weight

_ALIGNMENT = 512
_POISON = 0xFF


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


class DeviceMemory:
    """The regions of one program in device memory.

    ``poison`` fills everything that a run must write before it reads with 0xFF bytes, so that a
    kernel that reads what nobody wrote does not find zeros by luck. The regions ``shared`` are those
    of ``resident`` where it is given: it must be of the same plan and live as long.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        program: Program,
        *,
        poison: bool = False,
        resident: "DeviceMemory | None" = None,
        shared: Collection[Region] = (Region.WEIGHTS, Region.STATE),
    ) -> None:
        self._context = context
        self._bases = {} if resident is None else resident.bases(shared)
        if (Region.ARENA, 0) not in self._bases:
            self._take(Region.ARENA, (plan.arena_nbytes,), poison=poison)
        self._take(Region.INPUT, program.input_nbytes, poison=poison)
        self._take(Region.OUTPUT, program.output_nbytes, poison=poison)
        for region, nbytes, contents in (
            (Region.WEIGHTS, plan.weights_nbytes, plan.weights),
            (Region.STATE, plan.state_nbytes, plan.state),
        ):
            if (region, 0) not in self._bases:
                self._take(region, (nbytes,))
                self._upload(region, contents)

    def bases(self, regions: Collection[Region]) -> dict[tuple[Region, int], int]:
        """The addresses of these regions."""
        return {key: base for key, base in self._bases.items() if key[0] in regions}

    def _take(self, region: Region, sizes: Sequence[int], *, poison: bool = False) -> None:
        rounded = [_round_up(n) for n in sizes]
        if not rounded:
            return
        base = int(self._context.acquire(call("cuMemAlloc", sum(rounded)), "cuMemFree"))
        if poison:
            call("cuMemsetD8", base, _POISON, sum(rounded))
        for index, offset in enumerate(accumulate(rounded[:-1], initial=0)):
            self._bases[region, index] = base + offset

    def _upload(self, region: Region, weights: Iterable[Weight]) -> None:
        base = self._bases[region, 0]
        for weight in weights:
            if weight.data.nbytes:
                source = np.frombuffer(weight.data, np.uint8)
                call("cuMemcpyHtoD", base + weight.offset, source.ctypes.data, source.nbytes)

    def address(self, pointer: Pointer) -> int:
        """The device address of a pointer."""
        return self._bases[pointer.region, pointer.index] + pointer.offset


class Staging:
    """Page-locked host memory that mirrors tensors in device memory, one numpy view for each."""

    def __init__(self, context: Context, tensors: Sequence[Tensor], memory: DeviceMemory) -> None:
        sizes = [_round_up(t.span_nbytes) for t in tensors]
        offsets = list(accumulate(sizes, initial=0))
        address = context.acquire(call("cuMemHostAlloc", max(offsets[-1], 1), 0), "cuMemFreeHost")
        host = _host_bytes(int(address), max(offsets[-1], 1))
        self.views = tuple(
            _strided(host[offset : offset + t.span_nbytes], t)
            for t, offset in zip(tensors, offsets[:-1], strict=True)
        )
        self._copies = tuple(
            (memory.address(t.pointer), int(address) + offset, t.span_nbytes)
            for t, offset in zip(tensors, offsets[:-1], strict=True)
            if t.span_nbytes
        )

    def to_device(self, stream: object) -> None:
        """Enqueue the copies from host to device."""
        for device, host, nbytes in self._copies:
            call("cuMemcpyHtoDAsync", device, host, nbytes, stream)

    def to_host(self, stream: object) -> None:
        """Enqueue the copies from device to host."""
        for device, host, nbytes in self._copies:
            call("cuMemcpyDtoHAsync", host, device, nbytes, stream)


def _host_bytes(address: int, nbytes: int) -> np.ndarray:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _strided(span: np.ndarray, tensor: Tensor) -> np.ndarray:
    dtype = numpy_dtype(tensor.dtype)
    strides = tuple(s * dtype.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(span.view(dtype), tensor.shape, strides)
