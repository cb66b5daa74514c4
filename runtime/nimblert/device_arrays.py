"""Arrays on a GPU that others own: taken in and given out by DLPack and the CUDA array interface.

DLPack: https://dmlc.github.io/dlpack/latest/python_spec.html; the structs are those of dlpack.h, before
its version 1. The interface: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html,
version 3, which has no bfloat16.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from nimblert.dtypes import numpy_dtype
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES

_CPU, _CUDA, _PAGE_LOCKED = 1, 2, 3
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_CODES = {kind: code for code, kind in _KINDS.items()}

_NAME = b"dltensor"
_KEPT_NAME = ctypes.create_string_buffer(_NAME)  # a capsule holds the address of its name, no copy
_python = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_ending_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_ending_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArray:
    """Memory of a GPU that its owner keeps as long as this lives; ``strides`` in elements.

    ``stream`` is one that has yet to write the array: 1 and 2 are the legacy and the thread's default
    stream. None where it is written, or the stream that it was asked for has been told to wait.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    read_only: bool = False
    stream: int | None = None
    owner: Any = None


def place(value: Any) -> tuple[str, int] | None:
    """Where an array is: ("cuda", ordinal) or ("cpu", 0); None for what is no array, or on another kind of device."""
    asked = getattr(value, "__dlpack_device__", None)
    if asked is not None:
        kind, ordinal = asked()
        return ("cuda", int(ordinal)) if kind == _CUDA else ("cpu", 0) if kind in {_CPU, _PAGE_LOCKED} else None
    return ("cuda", -1) if hasattr(value, "__cuda_array_interface__") else None


def from_host(value: Any) -> np.ndarray:
    """The numpy array over what another library has in host memory. Raises InputError where numpy has no such dtype."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as exc:
        raise InputError(f"numpy cannot read it by DLPack: {exc}") from exc


def take(value: Any, stream: int) -> DeviceArray:
    """An array on a GPU, ready for what comes next on ``stream``. Raises InputError where it is not given."""
    if hasattr(value, "__dlpack__"):
        try:
            return _of_capsule(value.__dlpack__(stream=stream))
        except (BufferError, RuntimeError, TypeError, ValueError) as exc:
            raise InputError(f"it does not come by DLPack: {exc}") from exc
    return _of_interface(value.__cuda_array_interface__, value)


def _of_capsule(capsule: Any) -> DeviceArray:
    """What a capsule holds, which keeps it: nobody else may have consumed it."""
    tensor = _DLManagedTensor.from_address(_pointer(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _dense(shape)
    kind = _KINDS.get(tensor.code, f"of code {tensor.code}, bits ")
    name = kind if kind == "bool" else f"{kind}{tensor.bits}"
    return DeviceArray(
        address=(tensor.data or 0) + tensor.byte_offset,
        dtype=name if tensor.lanes == 1 else f"{name}x{tensor.lanes}",
        shape=shape,
        strides=strides,
        device=tensor.device_id,
        owner=capsule,
    )


def _of_interface(interface: Mapping[str, Any], owner: Any) -> DeviceArray:
    address, read_only = interface["data"]
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    nbytes = interface.get("strides") or tuple(stride * dtype.itemsize for stride in _dense(shape))
    if any(stride % dtype.itemsize for stride in nbytes):
        raise InputError("its strides are no whole numbers of elements")
    return DeviceArray(
        address=address,
        dtype=dtype.name,
        shape=shape,
        strides=tuple(stride // dtype.itemsize for stride in nbytes),
        device=-1,
        read_only=bool(read_only),
        stream=interface.get("stream"),
        owner=owner,
    )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


class DeviceOutput:
    """An output in memory of a GPU: `torch.from_dlpack`, `cupy.from_dlpack` or `jax.dlpack.from_dlpack` takes it.

    It is written when it is handed out. ``numpy`` copies it to the host.
    """

    def __init__(self, array: DeviceArray) -> None:
        self.shape = array.shape
        self.dtype = array.dtype
        self.strides = array.strides
        self.device = array.device
        self._array = array

    def __repr__(self) -> str:
        return f"DeviceOutput({self.dtype} {self.shape}, device {self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's kind of device, CUDA, and the ordinal."""
        return _CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """A capsule over the memory, which stays as long as the capsule or what consumed it."""
        del stream  # all is written
        return _capsule(self._array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface. AttributeError for bfloat16, which it lacks."""
        if self.dtype == "bfloat16":
            raise AttributeError("the CUDA array interface has no bfloat16: use DLPack")
        itemsize = ITEM_NBYTES[self.dtype]
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": numpy_dtype(self.dtype).str,
            "data": (self._array.address, False),
            "strides": tuple(stride * itemsize for stride in self.strides),
            "stream": None,
        }


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


def _capsule(array: DeviceArray) -> Any:
    rank = len(array.shape)
    shape, strides = ((ctypes.c_int64 * max(rank, 1))(*numbers) for numbers in (array.shape, array.strides))
    tensor = _DLTensor(
        data=array.address,
        device_type=_CUDA,
        device_id=array.device,
        ndim=rank,
        code=_CODES[array.dtype.rstrip("0123456789")],
        bits=8 * ITEM_NBYTES[array.dtype],
        lanes=1,
        shape=shape,
        strides=strides,
    )
    managed = _DLManagedTensor(tensor=tensor, deleter=ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, strides, array
    return _new_capsule(address, ctypes.addressof(_KEPT_NAME), ctypes.cast(_destructor, ctypes.c_void_p))
