"""State: the named tensors that a context keeps from run to run."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nimblert.arrays.layouts import dense_strides, numpy_dtype
from nimblert.calls import refitting
from nimblert.calls.entries import array_of_shape
from nimblert.errors import InputError
from nimblert.plan import Plan, Pointer, Region, Tensor, Weight

if TYPE_CHECKING:
    from nimblert.arrays.device_arrays import DeviceOutput
    from nimblert.arrays.dlpack import DeviceArray


class Working(Protocol):
    """The memory of a context, with its STATE region, which no run uses now."""

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes, as uint8."""

    def copy(self, tensor: Tensor) -> "DeviceOutput":
        """Return a copy of a tensor in device memory. Raises InputError where the state is on the host."""

    def write(self, tensor: Tensor, array: Any) -> None:
        """Copy an array of the tensor's dtype and shape into the tensor."""

    def reset(self) -> None:
        """Restore the initial values."""

    def take(self, value: Any, ordinal: int) -> "DeviceArray":
        """Return an array of the caller on the GPU of this ordinal, ready to be read. Raises InputError."""


class Owner(Protocol):
    """The context that has the state."""

    plan: Plan

    def between_runs(self) -> AbstractContextManager[Working]:
        """Provide its memory, which no run uses meanwhile. Raises InputError as a run would."""


class State(Mapping[str, np.ndarray]):
    """The state of a context by name, as numpy arrays: reading copies, assignment writes.

    >>> cache = exe.state["cache"]
    >>> exe.state["cache"] = np.zeros_like(cache)

    An assigned array has the tensor's dtype and shape, and may be anything that an input may be: an array of another
    library by DLPack, and on the CUDA target one on the GPU. A scalar may be a number of Python, which np.float64 is,
    too. Raises InputError for an unknown name, another dtype or shape, a closed context, and where another thread's run
    would have a call refused.
    """

    def __init__(self, context: Owner) -> None:
        self._context = context
        self._tensors = {weight.name: _tensor(weight) for weight in context.plan.state if weight.name}

    def __repr__(self) -> str:
        listed = ", ".join(f"{t.name!r}: {t.dtype} {t.shape}" for t in self._tensors.values())
        return f"State({listed})"

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        with self._context.between_runs() as working:
            return _content(working, tensor)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor of this name, or else ``default``."""
        if name not in self:
            return default
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Mapping[str, Any]) -> None:
        """Write several tensors, or none where an array does not fit."""
        if not isinstance(values, Mapping):
            raise InputError(f"state: got {type(values).__name__}, expected a dict of arrays by name")
        # ``values`` may be another state, even this one.
        given = list(values.items())
        with self._context.between_runs() as working:
            checked = [self._checked(name, value, working) for name, value in given]
            for tensor, array in checked:
                working.write(tensor, array)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a safetensors file. Raises InputError without that package, NimbleError for the file."""
        with self._context.between_runs() as working:
            content = {name: _content(working, tensor) for name, tensor in self._tensors.items()}
        refitting.write(path, content)

    def load(self, path: str | PathLike[str]) -> None:
        """Read it from a file that `save` wrote, for a plan with the same state. Raises InputError.

        Nothing is written where a tensor does not fit. The file may be replaced meanwhile, but not overwritten in place
        or truncated.
        """
        with self._context.between_runs() as working, refitting.opened(path) as found:
            if missing := [name for name in self._tensors if name not in found]:
                raise InputError(f"{os.fspath(path)}: lacks the state {missing[0]!r}")
            # All values are checked before any is written.
            for name in found:
                self._checked(name, found.outline(name), working)
            for name, array in found.items():
                working.write(*self._checked(name, array, working))

    def on_device(self, name: str) -> "DeviceOutput":
        """Return a copy on the plan's GPU, for DLPack or the CUDA array interface. Raises InputError."""
        tensor = self._tensor(name)
        with self._context.between_runs() as working:
            return working.copy(tensor)

    def _checked(self, name: str, value: Any, working: Working) -> "tuple[Tensor, np.ndarray | DeviceArray]":
        tensor = self._tensor(name)
        given = _number(tensor, value) if tensor.shape == () and isinstance(value, int | float) else value
        return tensor, array_of_shape("state", tensor, given, working.take)

    def _tensor(self, name: str) -> Tensor:
        known = list(self._tensors)
        if name not in known:
            raise InputError(f"state {name!r}: not found, the plan has {known or 'none'}")
        return self._tensors[name]


def _number(tensor: Tensor, value: float) -> Any:
    """Return a number of Python as a scalar of the tensor's dtype, if that holds such numbers; else as it is."""
    dtype = numpy_dtype(tensor.dtype)
    kinds = "b" if isinstance(value, bool) else "iuf" if isinstance(value, int) else "f"
    if dtype.kind not in kinds or dtype.name != tensor.dtype:
        return value
    if dtype.kind != "b" and (isinstance(value, int) or math.isfinite(value)):
        limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
        if not int(limits.min) <= value <= int(limits.max):
            raise InputError(f"state {tensor.name!r}: {value} is beyond the numbers of {tensor.dtype}")
    return np.asarray(value, dtype)


def _content(working: Working, tensor: Tensor) -> np.ndarray:
    content = working.read(tensor.pointer.offset, tensor.span_nbytes)
    return content.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def _tensor(weight: Weight) -> Tensor:
    shape, strides = weight.shape, dense_strides(weight.shape)
    pointer = Pointer(region=Region.STATE, offset=weight.offset)
    return Tensor(name=weight.name, dtype=weight.dtype, shape=shape, strides=strides, pointer=pointer)
