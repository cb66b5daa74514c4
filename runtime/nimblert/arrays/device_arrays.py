"""Arrays on a GPU, exchanged with other libraries by DLPack and the CUDA array interface.

DLPack: https://dmlc.github.io/dlpack/latest/python_spec.html. CUDA array interface, version 3, which lacks bfloat16:
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index
from typing import Any, TypeVar

import numpy as np

from nimblert.arrays import dlpack
from nimblert.arrays.dlpack import DeviceArray
from nimblert.arrays.layouts import dense_strides, numpy_dtype
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES

_CPU, _PAGE_LOCKED = 1, 3
"""DLPack's kinds of device for host memory."""

_LEGACY = 1
"""DLPack's number of the legacy default stream, which CUDA calls 0, too."""
_NO_STREAM = -1
"""That of a consumer that wants no stream to wait."""

_TYPESTR = re.compile(r"[<>|=]?[A-Za-z][1-9][0-9]*")
"""Byte order, kind, bytes."""

_T = TypeVar("_T")


def place(value: Any) -> tuple[str, int] | None:
    """Return the device of an array: ("cuda", ordinal) or ("cpu", 0); None for other devices, and for what is no array.

    Raises InputError where its library refuses.
    """
    if isinstance(value, DeviceArray):
        return "cuda", value.device
    asked = getattr(value, "__dlpack_device__", None)
    if asked is not None:
        try:
            kind, ordinal = asked()
        except dlpack.REFUSALS as exc:
            raise _not_exported(exc) from exc
        return ("cuda", int(ordinal)) if kind == dlpack.CUDA else ("cpu", 0) if kind in {_CPU, _PAGE_LOCKED} else None
    return ("cuda", -1) if hasattr(value, "__cuda_array_interface__") else None


def is_negated(value: Any) -> bool:
    """Return whether PyTorch negates a view lazily: its memory holds the opposite numbers."""
    asked = getattr(value, "is_neg", None)
    return asked is not None and bool(asked())


def at_once(value: Any) -> DeviceArray | None:
    """Return an array on a GPU of a library with fast exchange functions; else None, and `place` and `take` read it.

    Raises InputError where the library refuses.
    """
    exchange = dlpack.exchange(value)
    if exchange is None:
        return None
    try:
        return exchange.read(value)
    except dlpack.REFUSALS as exc:
        raise _not_exported(exc) from exc


def _not_exported(exc: Exception) -> InputError:
    return InputError(f"it does not come by DLPack: {_first_line(exc)}")


def _first_line(exc: Exception) -> str:
    """Return an exception's message without the stack of C++ calls that PyTorch adds."""
    return str(exc).partition("\n")[0]


def from_host(value: Any) -> np.ndarray:
    """Return a numpy array over another library's host array. Raises InputError where numpy cannot read it."""
    try:
        return np.from_dlpack(value)
    except dlpack.REFUSALS as exc:
        raise InputError(f"numpy cannot read it by DLPack: {_first_line(exc)}") from exc


def take(value: Any, stream: int) -> DeviceArray:
    """Return an array on a GPU, ready for later work on ``stream``. Raises InputError where its library refuses."""
    if isinstance(value, DeviceArray):
        return value
    if not hasattr(value, "__dlpack__"):
        return _of_interface(value.__cuda_array_interface__, value)
    try:
        return dlpack.from_capsule(value.__dlpack__(stream=stream or _LEGACY))
    except dlpack.REFUSALS as exc:
        raise _not_exported(exc) from exc


def _of_interface(interface: Any, owner: Any) -> DeviceArray:
    if not isinstance(interface, Mapping):
        raise InputError(f"its __cuda_array_interface__ is {interface!r:.80}, expected a dict")
    address, read_only = _entry(interface, "data", _address)
    dtype, shape = _entry(interface, "typestr", _dtype), _entry(interface, "shape", _numbers)
    dense = tuple(stride * dtype.itemsize for stride in dense_strides(shape))
    nbytes = _entry(interface, "strides", _numbers) if interface.get("strides") else dense
    if len(nbytes) != len(shape):
        raise InputError(f"its __cuda_array_interface__ has {len(nbytes)} strides for {len(shape)} axes")
    if any(stride % dtype.itemsize for stride in nbytes):
        raise InputError("its strides are not multiples of the element size")
    if not address and 0 not in shape:
        raise InputError("it has no memory")
    if not dtype.isnative:
        raise InputError(f"its bytes are in another order: dtype {dtype.str}, expected {dtype.newbyteorder('=').str}")
    if interface.get("mask") is not None:
        raise InputError("plans have no masks: fill in the masked values")
    return DeviceArray(
        address=address,
        dtype=dtype.name,
        shape=shape,
        strides=tuple(stride // dtype.itemsize for stride in nbytes),
        device=-1,
        read_only=read_only,
        stream=None if interface.get("stream") is None else _entry(interface, "stream", _stream),
        owner=owner,
    )


def _entry(interface: Mapping[str, Any], name: str, read: Callable[[Any], _T]) -> _T:
    """Return an entry of the interface, read by ``read``. Raises InputError where it is missing or invalid."""
    if name not in interface:
        raise InputError(f"its __cuda_array_interface__ has no {name!r}, which version 3 requires")
    try:
        return read(interface[name])
    except (TypeError, ValueError) as exc:
        raise InputError(
            f"its __cuda_array_interface__ has {name!r} {interface[name]!r:.80}, which version 3 does not allow"
        ) from exc


def _address(data: Any) -> tuple[int, bool]:
    address, read_only = data
    if not 0 <= index(address) < 1 << 64:
        raise ValueError("no address has so many bits")
    return index(address), bool(read_only)


def _stream(handle: Any) -> int:
    if not 0 <= index(handle) < 1 << 64:
        raise ValueError("no handle has so many bits")
    return index(handle)


def _dtype(typestr: Any) -> np.dtype:
    if not _TYPESTR.fullmatch(typestr):
        raise ValueError("numpy would read more: lists of fields, types without a size")
    dtype: np.dtype = np.dtype(typestr)
    return dtype


def _numbers(given: Any) -> tuple[int, ...]:
    return tuple(map(index, given))


class DeviceOutput:
    """An output in memory of a GPU, for `torch.from_dlpack`, `cupy.from_dlpack` or `jax.dlpack.from_dlpack`.

    It is complete when it is returned, unless the run was given a stream; then the stream of who reads it waits. For an
    output on the host, give `Context.run` a numpy array in ``out``.
    """

    def __init__(self, array: DeviceArray) -> None:
        """Wrap an array whose ``owner`` is a `nimblert.cuda.memory.PooledBlock`; None: the program's own memory."""
        self.shape = array.shape
        self.dtype = array.dtype
        self.strides = array.strides
        self.device = array.device
        self._array = array

    def __repr__(self) -> str:
        return f"DeviceOutput({self.dtype} {self.shape}, device {self.device})"

    def head(self, shape: tuple[int, ...]) -> "DeviceOutput":
        """Return its first elements along each axis, in the same memory."""
        return DeviceOutput(replace(self._array, shape=shape))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's kind of device, CUDA, and the ordinal."""
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule over the memory, which lives as long as the capsule or its consumer.

        Raises BufferError where a copy or another device is asked for, as the array API standard says.
        """
        # Every consumer reads the first version.
        del max_version
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("an output on a GPU is exported as it is: have the other library copy it")
        array = self._given()
        if array.precede is not None and stream != _NO_STREAM:
            array.precede(_LEGACY if stream is None else stream)
        return dlpack.capsule(array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface. AttributeError for bfloat16, which it lacks."""
        if self.dtype == "bfloat16":
            raise AttributeError("the CUDA array interface has no bfloat16: use DLPack")
        itemsize = ITEM_NBYTES[self.dtype]
        array = self._given()
        if array.precede is not None:
            array.precede(_LEGACY)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": numpy_dtype(self.dtype).str,
            "data": (array.address, False),
            "strides": tuple(stride * itemsize for stride in self.strides),
            "stream": None if array.precede is None else _LEGACY,
        }

    def _given(self) -> DeviceArray:
        """Return the array, for another library, whose work on it nobody waits for."""
        if (block := self._array.owner) is not None:
            block.is_shared = True
        return self._array
