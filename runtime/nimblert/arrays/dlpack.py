"""Arrays on a GPU as DLPack has them: https://dmlc.github.io/dlpack/latest.

Arrays of other libraries are read from capsules (unversioned structs), or with the functions that a library may offer
(DLPackExchangeAPI, version 1), which takes a tenth of the time. Our arrays are exported as capsules.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from nimblert.arrays.layouts import dense_strides
from nimblert.plan import ITEM_NBYTES

CUDA = 2
"""DLPack's kind of device for CUDA."""

REFUSALS = BufferError, RuntimeError, TypeError, ValueError
"""What libraries raise for an array that they do not export."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_CODES = {kind: code for code, kind in _KINDS.items()}

_NAME = b"dltensor"
_KEPT_NAME = ctypes.create_string_buffer(_NAME)  # a capsule refers to its name without a copy
_TABLE_NAME = b"dlpack_exchange_api"
_TABLE_MAJOR = 1

_python = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_text = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", _python))
_ending_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_ending_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)


_TENSOR = struct.Struct("<QiiiBBHQQQ")
"""DLTensor: data, kind and ordinal of the device, ndim, code, bits, lanes, shape, strides, byte offset."""

_RAW_TENSOR = struct.Struct("<Q16sQQQ")
"""DLTensor again: data, everything about device and elements as one field, shape, strides, byte offset."""
_RANK_AT = 8
"""The byte of that field that holds the rank, which fits a byte for every array that is read raw."""

_MANAGED = struct.Struct("<48s8xQ")
"""DLManagedTensor: the tensor, the manager's context (none here), the deleter."""

_TABLE = struct.Struct("<IIQ5Q")
"""DLPackExchangeAPI: version, the table of another version, and functions: an allocator, object to managed tensor and
back, object to tensor, and the current stream."""


@dataclass(slots=True, kw_only=True)  # not frozen: making one for an output would take three times as long
class DeviceArray:
    """An array in memory of a GPU, which ``owner`` keeps alive; ``strides`` are in elements.

    ``stream`` is a stream that may still write it: 1 and 2 are the legacy default stream and the thread's. None where
    it is written, or where the stream that is to read it waits already. ``precede`` makes a stream wait for what writes
    an output of ours; None where it is written.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    read_only: bool = False
    stream: int | None = None
    precede: Callable[[int], None] | None = None
    owner: Any = None

    @property
    def span(self) -> range:
        """The addresses from its lowest byte to its highest; none where it has no elements."""
        if 0 in self.shape:
            return range(0)
        ends = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        first, last = sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)
        itemsize = ITEM_NBYTES[self.dtype]
        return range(self.address + first * itemsize, self.address + (last + 1) * itemsize)


def _found(tensor: bytes, owner: Any) -> tuple[int, DeviceArray]:
    """Return the kind of device and the array of a DLTensor. Raises BufferError where it has no memory."""
    data, kind, device, rank, code, bits, lanes, shape_at, strides_at, offset = _TENSOR.unpack(tensor)
    shape = _numbers(shape_at, rank)
    strides = _numbers(strides_at, rank) if strides_at else dense_strides(shape)
    if not data and 0 not in shape:
        raise BufferError("it has no memory, as a fake tensor has none: give an array of numbers")
    dtype = _dtype_name(code, bits, lanes)
    return kind, DeviceArray(
        address=data + offset, dtype=dtype, shape=shape, strides=strides, device=device, owner=owner
    )


def _numbers(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_int64 * count).from_address(address)) if count else ()


@cache
def _dtype_name(code: int, bits: int, lanes: int) -> str:
    kind = _KINDS.get(code, f"of code {code}, bits ")
    name = kind if kind == "bool" else f"{kind}{bits}"
    return name if lanes == 1 else f"{name}x{lanes}"


def from_capsule(capsule: Any) -> DeviceArray:
    """Return the array of a capsule, which nobody may have consumed, and which keeps the memory alive."""
    return _found(_text(_pointer(capsule, _NAME), _TENSOR.size), capsule)[1]


Raw: TypeAlias = tuple[int, bytes, bytes, bytes]
"""An array's address, and its header, shape and strides as DLPack stores them."""


class Exchange:
    """The exchange functions of a type of arrays. Thread-safe."""

    def __init__(self, tensor_from_object: int, current_stream: int) -> None:
        self._read = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_void_p)(tensor_from_object)
        self._stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(current_stream)

    def read(self, value: Any) -> DeviceArray | None:
        """Return an array on a GPU, with the stream that its library uses; None where `__dlpack__` must be asked."""
        if getattr(value, "requires_grad", False):  # PyTorch's __dlpack__ refuses it with a reason
            return None
        tensor = ctypes.create_string_buffer(_TENSOR.size)
        self._read(value, ctypes.addressof(tensor))
        kind, found = _found(tensor.raw, value)
        if kind != CUDA or found.dtype.startswith("complex"):  # PyTorch omits the conjugate bit here
            return None
        found.stream = self.stream_reader(found.device)()
        return found

    def stream_reader(self, device: int) -> Callable[[], int]:
        """Return a function that returns the stream that the library uses on a GPU, for one thread at a time."""
        stream, ask = ctypes.c_void_p(), self._stream
        arguments = ctypes.c_int32(CUDA), ctypes.c_int32(device), ctypes.c_void_p(ctypes.addressof(stream))

        def current() -> int:
            ask(*arguments)
            return stream.value or 0

        return current

    def reader(self) -> Callable[[Any], Raw]:
        """Return a function that reads an array in less than half the time of `read`, for one thread at a time.

        It raises what the library raises.
        """
        buffer = ctypes.create_string_buffer(_TENSOR.size)
        read, into = self._read, ctypes.c_void_p(ctypes.addressof(buffer))
        known, found = b"", (0, b"", b"", b"")
        shape = strides = _bytes_at(0, 0)

        def raw(value: Any) -> Raw:
            nonlocal known, found, shape, strides
            read(value, into)
            now = buffer.raw
            if now != known:
                # After an exception below, no layout is known.
                known = b""
                address, header, shape, strides = _parsed(now)
                found = address, header, shape.raw, strides.raw
                known = now
            elif shape.raw != found[2] or strides.raw != found[3]:
                # The array was changed in place.
                found = *found[:2], shape.raw, strides.raw
            return found

        return raw


def _parsed(tensor: bytes) -> "tuple[int, bytes, ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]":
    """Return the address and header of a DLTensor, and views of its shape and strides."""
    data, header, shape_at, strides_at, offset = _RAW_TENSOR.unpack(tensor)
    nbytes = 8 * header[_RANK_AT]
    return data + offset, header, _bytes_at(shape_at, nbytes), _bytes_at(strides_at, nbytes)


def _bytes_at(address: int, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
    """Return the bytes at an address, whose ``raw`` is a copy; none at address 0."""
    return (ctypes.c_char * nbytes).from_address(address) if address else (ctypes.c_char * 0)()


def exchange(value: Any) -> Exchange | None:
    """Return the exchange functions of an array's type, or None."""
    kind = type(value)
    if kind not in _exchanges:
        _exchanges[kind] = _exchange(kind)
    return _exchanges[kind]


_exchanges: dict[type, Exchange | None] = {}


def _exchange(kind: type) -> Exchange | None:
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    address = 0 if capsule is None else _pointer(capsule, _TABLE_NAME)
    while address:
        major, _, previous, *functions = _TABLE.unpack(_text(address, _TABLE.size))
        tensor_from_object, current_stream = functions[-2:]
        if major == _TABLE_MAJOR and tensor_from_object and current_stream:
            return Exchange(tensor_from_object, current_stream)
        address = previous
    return None


_exported: dict[int, tuple[Any, ...]] = {}
"""The memory that consumers of capsules use, by the address of its struct."""


# The interpreter may clear this module before the last arrays of other libraries end: what they call then is bound
# here, and never freed.
def _forget(address: int, exported: dict[int, tuple[Any, ...]] = _exported) -> None:
    exported.pop(address, None)


def _forget_unused(
    capsule: int, is_valid: Any = _ending_is_valid, pointer: Any = _ending_pointer, name: bytes = _NAME,
    forget: Callable[[int], None] = _forget,
) -> None:
    """Free the memory of a capsule that ends without having been consumed."""
    if is_valid(capsule, name):
        forget(pointer(capsule, name))


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)  # consumers may call it without the GIL
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_unused)
_DELETER = ctypes.cast(_deleter, ctypes.c_void_p).value
_DESTRUCTOR = ctypes.cast(_destructor, ctypes.c_void_p).value
for _called in (_deleter, _destructor, _KEPT_NAME):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_called))


def capsule(array: DeviceArray) -> Any:
    """Return a capsule over an array on a GPU, whose owner lives as long as the capsule or its consumer."""
    rank = len(array.shape)
    buffer = ctypes.create_string_buffer(_MANAGED.size + 16 * rank)
    address = ctypes.addressof(buffer)
    code, numbers = _CODES[array.dtype.rstrip("0123456789")], address + _MANAGED.size
    bits = 8 * ITEM_NBYTES[array.dtype]
    tensor = _TENSOR.pack(array.address, CUDA, array.device, rank, code, bits, 1, numbers, numbers + 8 * rank, 0)
    _MANAGED.pack_into(buffer, 0, tensor, _DELETER)
    struct.pack_into(f"<{2 * rank}q", buffer, _MANAGED.size, *array.shape, *array.strides)
    _exported[address] = buffer, array
    return _new_capsule(address, ctypes.addressof(_KEPT_NAME), _DESTRUCTOR)
