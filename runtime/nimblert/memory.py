"""Device memory of a program: one allocation for each region, the inputs and outputs packed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from nimblert.driver import Context, call
from nimblert.dtypes import numpy_dtype
from nimblert.plan import Plan, Pointer, Program, Region, Tensor, Weight

_ALIGNMENT = 512
_POISON = 0xFF

Bases: TypeAlias = Mapping[tuple[Region, int], int]
"""Device addresses of the parts of regions."""


def _round_up(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def allocate(context: Context, nbytes: int, *, poison: bool = False) -> int:
    """The address of so many bytes of device memory, which go with the context."""
    base = int(context.acquire(call("cuMemAlloc", _round_up(nbytes)), "cuMemFree"))
    if poison:
        call("cuMemsetD8", base, _POISON, _round_up(nbytes))
    return base


def place_weights(context: Context, plan: Plan) -> Bases:
    """The weights of a plan in device memory."""
    return {(Region.WEIGHTS, 0): _uploaded(context, plan.weights_nbytes, plan.weights)}


def place_working(context: Context, plan: Plan, arena: int | None = None, *, poison: bool = False) -> Bases:
    """What the programs of a context share: the arena, which may be the caller's, and the state.

    ``poison`` fills the arena with 0xFF bytes, so that a kernel that reads what nobody wrote does not
    find zeros by luck.
    """
    if arena is None:
        arena = allocate(context, plan.arena_nbytes, poison=poison)
    return {(Region.ARENA, 0): arena, (Region.STATE, 0): _uploaded(context, plan.state_nbytes, plan.state)}


def _uploaded(context: Context, nbytes: int, contents: Iterable[Weight]) -> int:
    base = allocate(context, nbytes)
    for weight in contents:
        if weight.data.nbytes:
            source = np.frombuffer(weight.data, np.uint8)
            call("cuMemcpyHtoD", base + weight.offset, source.ctypes.data, source.nbytes)
    return base


class DeviceMemory:
    """The regions of one program in device memory: inputs and outputs of its own, and those ``given``.

    ``poison`` fills inputs and outputs with 0xFF bytes.
    """

    def __init__(self, context: Context, program: Program, given: Bases, *, poison: bool = False) -> None:
        self._bases = dict(given)
        for region, sizes in ((Region.INPUT, program.input_nbytes), (Region.OUTPUT, program.output_nbytes)):
            rounded = [_round_up(nbytes) for nbytes in sizes]
            if rounded:
                base = allocate(context, sum(rounded), poison=poison)
                offsets = accumulate(rounded[:-1], initial=0)
                self._bases |= {(region, index): base + offset for index, offset in enumerate(offsets)}

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
            _strided(host[offset : offset + t.span_nbytes], t) for t, offset in zip(tensors, offsets[:-1], strict=True)
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
