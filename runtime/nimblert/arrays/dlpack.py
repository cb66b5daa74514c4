"""DLPack's structs in Python: https://dmlc.github.io/dlpack/latest.

Arrays of others are read from a capsule, before version 1 of the structs, or from the table of functions
that a library may offer (DLPackExchangeAPI, version 1), which takes a tenth of the time. What is given out
is a capsule.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from nimblert.arrays.layouts import dense_strides
from nimblert.plan import ITEM_NBYTES

CUDA = 2
"""Its kind of device."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_CODES = {kind: code for code, kind in _KINDS.items()}

_NAME = b"dltensor"
_KEPT_NAME = ctypes.create_string_buffer(_NAME)  # a capsule holds the address of its name, no copy
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
"""The same: data, all that is said of device and elements, shape, strides, byte offset."""
_RANK_AT = 8
"""Where in its second field the rank is; of none that is read raw it has more than a byte."""

_MANAGED = struct.Struct("<48s8xQ")
"""DLManagedTensor: the tensor, the manager's context (none of ours), the deleter."""

_TABLE = struct.Struct("<IIQ5Q")
"""DLPackExchangeAPI: version, the table of another version, and functions: an allocator, from an object to
a managed tensor and back, from an object to a tensor, and the current stream."""


class Found(NamedTuple):
    """Where an array is; ``strides`` in elements, ``device`` the ordinal."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


def _found(tensor: bytes) -> tuple[int, Found]:
    """The kind of device, and what a DLTensor says. BufferError where its numbers lie nowhere."""
    data, kind, device, rank, code, bits, lanes, shape_at, strides_at, offset = _TENSOR.unpack(tensor)
    shape = _numbers(shape_at, rank)
    strides = _numbers(strides_at, rank) if strides_at else dense_strides(shape)
    if not data and 0 not in shape:
        raise BufferError("it has no memory, as a fake tensor has none: give an array of numbers")
    return kind, Found(data + offset, _dtype_name(code, bits, lanes), shape, strides, device)


def _numbers(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_int64 * count).from_address(address)) if count else ()


@cache
def _dtype_name(code: int, bits: int, lanes: int) -> str:
    kind = _KINDS.get(code, f"of code {code}, bits ")
    name = kind if kind == "bool" else f"{kind}{bits}"
    return name if lanes == 1 else f"{name}x{lanes}"


def from_capsule(capsule: Any) -> Found:
    """What a capsule holds, which keeps it: nobody else may have consumed it."""
    return _found(_text(_pointer(capsule, _NAME), _TENSOR.size))[1]


Raw: TypeAlias = tuple[int, bytes, bytes, bytes]
"""How an array lies: its address, and its header, shape and strides as `raw_header` and `raw_numbers` write them."""


def raw_header(dtype: str, rank: int, device: int) -> bytes:
    """The header of arrays of this kind on a GPU."""
    code = _CODES[dtype.rstrip("0123456789")]
    return struct.pack("<iiiBBH", CUDA, device, rank, code, 8 * ITEM_NBYTES[dtype], 1)


def raw_numbers(numbers: Sequence[int]) -> bytes:
    """A shape, or strides in elements."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


class Exchange:
    """The functions that a type of arrays offers. Thread-safe."""

    def __init__(self, tensor_from_object: int, current_stream: int) -> None:
        self._read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(tensor_from_object)
        self._stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(current_stream)

    def read(self, value: Any) -> tuple[Found, int] | None:
        """An array on a GPU and the stream that its library works on there; None where `__dlpack__` has to say.

        It is not kept: ``value`` must be.
        """
        if getattr(value, "requires_grad", False):  # torch refuses it there, and says why
            return None
        tensor = ctypes.create_string_buffer(_TENSOR.size)
        self._read(value, ctypes.addressof(tensor))
        kind, found = _found(tensor.raw)
        if kind != CUDA or found.dtype.startswith("complex"):  # torch leaves the conjugate bit out here
            return None
        return found, self.stream(found.device)

    def stream(self, device: int) -> int:
        """The stream that the library works on, on a GPU."""
        return self.stream_reader(device)()

    def stream_reader(self, device: int) -> Callable[[], int]:
        """What tells the same as `stream`, to one thread at a time, in half the time."""
        stream = ctypes.c_void_p()
        address, ask = ctypes.addressof(stream), self._stream

        def current() -> int:
            ask(CUDA, device, address)
            return stream.value or 0

        return current

    def reader(self) -> Callable[[Any], Raw]:
        """What tells how an array lies, to one thread at a time, in less than half the time of `read`.

        It raises what the library does.
        """
        buffer = ctypes.create_string_buffer(_TENSOR.size)
        address, read, unpack = ctypes.addressof(buffer), self._read, _RAW_TENSOR.unpack_from
        known, views = (0, 0, 0), (memoryview(b""), memoryview(b""))

        def raw(value: Any) -> Raw:
            nonlocal known, views
            read(value, address)
            data, header, shape_at, strides_at, offset = unpack(buffer)
            place = shape_at, strides_at, header[_RANK_AT]
            if place != known:  # numbers where they were are read from there again
                views = _view(shape_at, header[_RANK_AT]), _view(strides_at, header[_RANK_AT])
                known = place
            return data + offset, header, bytes(views[0]), bytes(views[1])

        return raw

    def watch(self, value: Any) -> Callable[[], bool]:
        """What tells one thread at a time whether an array lies as it does now. It raises what the library does."""
        read = self.reader()
        place = read(value)
        return lambda: read(value) == place


def _view(address: int, count: int) -> memoryview:
    """So many numbers there; none at no address."""
    return memoryview((ctypes.c_int64 * count).from_address(address) if address and count else b"").cast("B")


def exchange(value: Any) -> Exchange | None:
    """The functions that the type of an array offers, or None."""
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
"""What consumers of capsules hold, by the address of its struct."""


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _forget_unused(capsule: int) -> None:
    """The end of a capsule: that of one which nobody consumed is the end of its memory, too."""
    if _ending_is_valid(capsule, _NAME):
        _forget(_ending_pointer(capsule, _NAME))


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)  # consumers may call it without the lock of Python
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_forget_unused)
_DELETER = ctypes.cast(_deleter, ctypes.c_void_p).value
_DESTRUCTOR = ctypes.cast(_destructor, ctypes.c_void_p).value


def capsule(found: Found, itemsize: int, owner: object) -> Any:
    """A capsule over an array on a GPU. ``owner`` stays as long as it, or as what consumed it."""
    rank = len(found.shape)
    buffer = ctypes.create_string_buffer(_MANAGED.size + 16 * rank)
    address = ctypes.addressof(buffer)
    code, numbers = _CODES[found.dtype.rstrip("0123456789")], address + _MANAGED.size
    tensor = _TENSOR.pack(
        found.address, CUDA, found.device, rank, code, 8 * itemsize, 1, numbers, numbers + 8 * rank, 0
    )
    _MANAGED.pack_into(buffer, 0, tensor, _DELETER)
    struct.pack_into(f"<{2 * rank}q", buffer, _MANAGED.size, *found.shape, *found.strides)
    _exported[address] = buffer, owner
    return _new_capsule(address, ctypes.addressof(_KEPT_NAME), _DESTRUCTOR)
