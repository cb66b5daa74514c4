"""Bindings: arrays of the caller that a program reads and writes in place."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nimblert.arrays import device_arrays, dlpack, layouts
from nimblert.arrays.dlpack import DeviceArray
from nimblert.calls.backend import Backend
from nimblert.calls.entries import Signature, Take, checked_array
from nimblert.errors import InputError
from nimblert.plan import Program, Region, Tensor

VECTOR_NBYTES = 16
"""The alignment, in bytes, that kernels with vector loads rely on: they were chosen for memory of an allocator."""

Array: TypeAlias = np.ndarray | DeviceArray

_Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, shape and strides."""


class Binding(NamedTuple):
    """An input or output of a program, and the array to use in place of its memory; None restores that memory."""

    program: Program
    tensor: Tensor
    array: Array | None


class _Bound(NamedTuple):
    tensor: Tensor
    value: Any
    """The caller's object."""
    array: Array
    is_there: Callable[[], bool]
    """Whether the array has not moved, as far as its library tells; may raise `dlpack.REFUSALS`."""


class Bindings:
    """The bindings of one entry, all for one ``program``; None where nothing is bound."""

    def __init__(self, signature: Signature) -> None:
        self.program: Program | None = None
        self._signature = signature
        self._bound: dict[str, _Bound] = {}

    def check(self, name: str, value: Any, take: Take) -> Binding:
        """Return the binding of an input or output to an array of the caller; None restores the plan's own memory.

        Raises InputError where the array cannot be bound, or nothing is.
        """
        if value is None:
            if self.program is None or name not in self._bound:
                raise InputError(f"bind: nothing is bound to {name!r}")
            return Binding(self.program, self._bound[name].tensor, None)
        found = [(p, t) for p in self._signature.programs for t in (*p.inputs, *p.outputs) if t.name == name]
        if not found:
            names = [t.name for t in (*self._signature.programs[0].inputs, *self._signature.programs[0].outputs)]
            raise InputError(f"bind: {name!r} is not one of the plan's inputs and outputs {names}")
        if len(found) > len(self._signature.programs):
            raise InputError(f"bind {name!r}: an input and an output have this name: give their arrays with each run")
        array = checked_array("bind", found[0][1], value, take)
        fitting = [(program, tensor) for program, tensor in found if tensor.shape == tuple(array.shape)]
        if not fitting:
            shapes = " or ".join(str(tensor.shape) for _, tensor in found)
            raise InputError(f"bind {name!r}: shape {tuple(array.shape)}, expected {shapes}")
        program, tensor = next((pair for pair in fitting if pair[0] is self.program), fitting[0])
        if program is not self.program and (self.program is not None or len(fitting) > 1):
            raise InputError(
                f"bind {name!r}: the shape fits several programs, or another one than is bound: first bind an array "
                f"whose shape fits one program alone, and unbind (None) those of the other"
            )
        _check_layout(program, tensor, array)
        for other in self._bound.values():
            written = Region.OUTPUT in {tensor.pointer.region, other.tensor.pointer.region}
            if other.tensor.name != name and written and _overlap(tensor, array, other.tensor, _address(other.array)):
                raise InputError(f"bind {name!r}: shares memory with what {other.tensor.name!r} is bound to")
        return Binding(program, tensor, array)

    def bind(self, binding: Binding, value: Any, backend: Backend) -> None:
        """Have the program use the array of a checked ``binding``, made of the caller's ``value``.

        Raises InputError where the array is the program's own memory for another output, which a run writes.
        """
        program, tensor, array = binding
        bound = dict(self._bound)
        if array is None:
            del bound[tensor.name]
        else:
            for other in program.outputs:
                if other.name != tensor.name and _overlap(tensor, array, other, backend.own_address(other)):
                    raise InputError(
                        f"bind {tensor.name!r}: shares memory with the plan's own for {other.name!r}: bind a copy"
                    )
            bound[tensor.name] = _Bound(tensor, value, array, _watch(value, array))
        backend.bind(tensor, array)
        self._bound = bound
        self.program = program if bound else None

    def complete(self, arrays: Mapping[str, Any], take: Take) -> Mapping[str, Any]:
        """Return the arrays of a run, bound inputs included; ``take`` has it wait for what still uses bound outputs.

        Raises InputError where a bound input is also given, or a bound array has moved.
        """
        self.check_in_place()
        if not self._bound or not isinstance(arrays, Mapping):
            return arrays
        for bound in self._bound.values():
            if bound.tensor.pointer.region is Region.OUTPUT and isinstance(bound.array, DeviceArray):
                checked_array("bind", bound.tensor, bound.value, take)
        if twice := [name for name in arrays if name in self._bound]:
            raise InputError(f"input {twice[0]!r} is bound: write into its array, or bind it to None first")
        return {**arrays, **self._side(Region.INPUT)}

    def outputs(self) -> dict[str, Any]:
        """Return the bound outputs by name, as the caller's objects."""
        return self._side(Region.OUTPUT)

    def _side(self, region: Region) -> dict[str, Any]:
        return {name: bound.value for name, bound in self._bound.items() if bound.tensor.pointer.region is region}

    def check_program(self, program: Program | None) -> None:
        """Raise InputError where the bindings are another program's."""
        if self.program is not None and self.program is not program:
            raise InputError(f"inputs have other sizes than the program for which {list(self._bound)} are bound")

    def check_in_place(self) -> None:
        """Raise InputError where a bound array has moved."""
        for name, bound in self._bound.items():
            try:
                is_there = bound.is_there()
            except dlpack.REFUSALS as exc:
                raise InputError(f"{name!r}: its array can no longer be used: {exc}") from exc
            if not is_there:
                raise InputError(f"{name!r}: its array was moved or resized since it was bound: bind it again")



def _watch(value: Any, array: Array) -> Callable[[], bool]:
    """Return a function that tells whether the caller's array is still where it is now."""
    if isinstance(array, DeviceArray):
        exchange = dlpack.exchange(value)
        return _stays(partial(_place, array) if exchange is None else partial(exchange.reader(), value))
    if isinstance(value, np.ndarray):
        return _stays(partial(_place, value))
    return _stays(lambda: _place(device_arrays.from_host(value)))


def _stays(where: Callable[[], object]) -> Callable[[], bool]:
    place = where()
    return lambda: where() == place


def _place(array: Array) -> _Place:
    return _address(array), tuple(array.shape), tuple(array.strides)


def _overlap(tensor: Tensor, array: Array, other: Tensor, other_start: int) -> bool:
    """Return whether the array for a tensor shares memory with another tensor's at ``other_start``."""
    start = _address(array)
    return start < other_start + other.span_nbytes and other_start < start + tensor.span_nbytes


def fills_memory(program: Program, tensor: Tensor) -> bool:
    """Return whether the INPUT or OUTPUT region of a tensor holds that tensor and nothing more."""
    sizes = program.input_nbytes if tensor.pointer.region is Region.INPUT else program.output_nbytes
    return not tensor.pointer.offset and sizes[tensor.pointer.index] <= tensor.span_nbytes


def _check_layout(program: Program, tensor: Tensor, array: Array) -> None:
    """Raise InputError where kernels cannot use the array instead of the program's own memory."""
    where = f"bind {tensor.name!r}"
    if tensor.pointer.region not in {Region.INPUT, Region.OUTPUT}:
        raise InputError(f"{where}: it lies in {tensor.pointer.region.name}, which other tensors share")
    if not fills_memory(program, tensor):
        raise InputError(f"{where}: its region holds more than the tensor")
    if layouts.has_gaps(tensor.shape, tensor.strides):
        raise InputError(
            f"{where}: the plan's layout, strides {tensor.strides}, has gaps, which kernels may read and write: "
            "give the array with each run"
        )
    step, unit = (1, "elements") if isinstance(array, DeviceArray) else (array.itemsize, "bytes")
    expected = tuple(stride * step for stride in tensor.strides)
    different = [axis for axis, size in enumerate(tensor.shape) if size > 1 and array.strides[axis] != expected[axis]]
    if different and tensor.span_nbytes:
        raise InputError(f"{where}: strides {array.strides} in {unit}, expected {expected}")
    if _address(array) % VECTOR_NBYTES:
        raise InputError(
            f"{where}: address {_address(array):#x}, expected a multiple of {VECTOR_NBYTES}: give an array with memory "
            "of its own, not a part of another"
        )
    read_only = array.read_only if isinstance(array, DeviceArray) else not array.flags.writeable
    if read_only and tensor.pointer.region is Region.OUTPUT:
        raise InputError(f"{where}: the array is read-only")


def _address(array: Array) -> int:
    return array.address if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])
