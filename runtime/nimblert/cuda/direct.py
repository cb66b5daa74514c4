"""The usual call of a CUDA plan as one function: inputs all from numpy, or all from one GPU library.

The time of Python before the launch is the overhead of a call over a replay.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from nimblert.arrays import dlpack, padding
from nimblert.arrays.dtypes import numpy_dtype
from nimblert.calls.remembering import remembered
from nimblert.calls.turn import Turn
from nimblert.cuda.transfers import Given, Outlet
from nimblert.plan import ITEM_NBYTES, Program, Tensor

if TYPE_CHECKING:
    from nimblert.arrays.device_arrays import DeviceOutput
    from nimblert.cuda.movers import Mover
    from nimblert.dimensions import Shapes

_Library: TypeAlias = tuple[
    list[tuple[str, Callable[[Any], dlpack.Raw]]], Callable[[], int], Callable[[Any], bool] | None
]
"""A reader for each input by name, as each is fastest on one layout; one of the stream that the library uses; and one
that tells whether an array is a negated view, see `device_arrays.is_negated`."""


class Loaded(Protocol):
    """The backend of a program on a GPU."""

    @property
    def movers(self) -> "Sequence[Mapping[bytes, Mover]]":
        """For each input its movers of device arrays, by `dlpack.raw_numbers` of shape and strides, as far as known."""

    def call_from_host(self, arrays: Sequence[np.ndarray]) -> "dict[str, np.ndarray | DeviceOutput]":
        """Run on inputs on the host, and return new outputs there, by name."""

    def call_from_device(
        self, arrays: Given, stream: int, outlet: Outlet
    ) -> "dict[str, np.ndarray | DeviceOutput]":
        """Run on inputs on the device, and return new outputs there, by name; ``outlet`` crops where movers pad."""


class DeviceDirect:
    """Calls of a program, until something changes in the context.

    With ``shapes``, smaller ones of its inputs, calls from the device alone; ``outlet`` then crops the outputs.
    """

    def __init__(
        self,
        turn: Turn,
        program: Program,
        backend: Loaded,
        device: int,
        shapes: "Shapes | None",
        outlet: Outlet,
    ) -> None:
        self._turn, self._state, self._program, self._backend, self._device = turn, turn.state, program, backend, device
        self._outlet = outlet
        self._is_padded = shapes is not None
        given = [tensor.shape for tensor in program.inputs] if shapes is None else shapes
        tensors = [padding.head(tensor, shape) for tensor, shape in zip(program.inputs, given, strict=True)]
        usual = all(t.span_nbytes and not t.dtype.startswith("complex") for t in tensors)  # see `dlpack.Exchange.read`
        self._count = len(tensors) if usual else -1
        self._host = [(t.name, _numpy_dtype(t), t.shape) for t in tensors]
        self._lying = [_lying(t, device) for t in tensors]
        self._libraries: dict[type, _Library | None] = {}
        self._given: dict[tuple[dlpack.Raw, ...], Given] = {}

    def __call__(self, arrays: Mapping[str, Any]) -> "dict[str, np.ndarray | DeviceOutput] | None":
        """The outputs by name; None, having done nothing, for any other call. Raises CudaError."""
        turn = self._turn
        if turn.lock.locked() or turn.process != os.getpid():
            return None
        if type(arrays) is not dict or len(arrays) != self._count or not arrays:
            return None
        with turn.owner, turn.lock:
            if turn.state is not self._state:
                return None
            first = next(iter(arrays.values()))
            return self._from_host(arrays) if type(first) is np.ndarray else self._from_device(arrays, first)

    def is_for(self, turn: Turn) -> bool:
        """Whether nothing has changed in the context since this was made."""
        return turn is self._turn and turn.state is self._state

    def _from_host(self, arrays: dict[str, Any]) -> "dict[str, np.ndarray | DeviceOutput] | None":
        if self._is_padded:
            return None
        given = []
        for name, dtype, shape in self._host:
            array = arrays.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return None
            given.append(array)
        self._turn.program, self._turn.parts = self._program, 1
        return self._backend.call_from_host(given)

    def _from_device(self, arrays: dict[str, Any], first: Any) -> "dict[str, np.ndarray | DeviceOutput] | None":
        kind = type(first)
        if kind not in self._libraries:
            self._libraries[kind] = self._library(first)
        library = self._libraries[kind]
        if library is None:
            return None
        readers, stream, is_negated = library
        found = []
        try:
            for name, read in readers:
                array = arrays.get(name)
                if type(array) is not kind or getattr(array, "requires_grad", False):
                    return None
                if is_negated is not None and is_negated(array):
                    return None
                found.append(read(array))
        except dlpack.REFUSALS:
            return None  # the full check says why
        raw = tuple(found)
        given = self._given.get(raw) or self._moved(raw)
        if given is None:
            return None
        self._turn.program, self._turn.parts = self._program, 1
        return self._backend.call_from_device(given, stream(), self._outlet)

    def _moved(self, arrays: "tuple[dlpack.Raw, ...]") -> Given | None:
        """The movers of these arrays, which are remembered; None where the program does not take them as they are."""
        given = []
        for (address, lying, sizes, strides), (itemsize, header, shape), movers in zip(
            arrays, self._lying, self._backend.movers, strict=True
        ):
            mover = movers.get(sizes + strides)
            if mover is None or lying != header or sizes != shape or not address or address % itemsize:
                return None
            given.append((mover, address))
        return remembered(self._given, arrays, tuple(given))

    def _library(self, array: Any) -> "_Library | None":
        """The functions of an array's library, if it has them."""
        found = dlpack.exchange(array)
        if found is None:
            return None
        readers = [(name, found.reader()) for name, *_ in self._host]
        return readers, found.stream_reader(self._device), getattr(type(array), "is_neg", None)


def _numpy_dtype(tensor: Tensor) -> np.dtype | None:
    """None for bfloat16, which numpy lacks."""
    return None if tensor.dtype == "bfloat16" else numpy_dtype(tensor.dtype)


def _lying(tensor: Tensor, device: int) -> tuple[int, bytes, bytes]:
    """The bytes of an element, and the DLPack header and shape of device arrays for a tensor."""
    header = dlpack.raw_header(tensor.dtype, len(tensor.shape), device)
    return ITEM_NBYTES[tensor.dtype], header, dlpack.raw_numbers(tensor.shape)
