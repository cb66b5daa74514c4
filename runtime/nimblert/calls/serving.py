"""Where the outputs of a call go, and calls of sizes that no program is for, as `nimblert.calls.sizes` serves them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.calls.binding import owned
from nimblert.calls.entries import Take, checked_array
from nimblert.calls.sizes import Index, Served
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Program, Tensor

if TYPE_CHECKING:
    from nimblert.calls.backend import Backend

A = TypeVar("A", np.ndarray, DeviceArray)


def serve(
    served: Served,
    arrays: Sequence[Any],
    out: Mapping[str, Any],
    backend_of: "Callable[[Program], Backend]",
    *,
    reuse_outputs: bool,
    stream: int | None,
) -> dict[str, Any]:
    """The outputs by name but for those in ``out``, which the caller's arrays take; ``backend_of`` runs a program.

    The outputs of several runs are parts of the same arrays, which are new where ``out`` gives none.
    """
    if len(served.parts) == 1:
        (run,) = served.parts
        backend = backend_of(run.program)
        return backend.call(arrays, out, reuse_outputs=reuse_outputs, shapes=run.shapes, stream=stream)
    backend = backend_of(served.parts[0].program)
    on_device = stream is not None or any(isinstance(array, DeviceArray) for array in arrays)
    for name, mine in out.items():
        if any(share_memory(mine, array) for array in arrays):
            raise InputError(
                f"out {name!r}: shares memory with an input, which is read after a part of the output was written "
                f"where a call is {len(served.parts)} runs: give it memory of its own"
            )
    whole = {t.name: out[t.name] if t.name in out else backend.empty(t, on_device=on_device) for t in served.outputs}
    for run in served.parts:
        given = [part(array, index) for array, index in zip(arrays, run.inputs, strict=True)]
        taken = {name: part(whole[name], index) for name, index in zip(whole, run.outputs, strict=True)}
        backend_of(run.program).call(given, taken, reuse_outputs=False, shapes=run.shapes, stream=stream)
    return {name: DeviceOutput(a) if isinstance(a, DeviceArray) else a for name, a in whole.items()}


def checked_out(tensors: Sequence[Tensor], out: Mapping[str, Any], take: Take) -> dict[str, np.ndarray | DeviceArray]:
    """The caller's arrays for outputs. Raises InputError where one cannot take the output that it is given for."""
    outputs = {tensor.name: tensor for tensor in tensors}
    checked: dict[str, np.ndarray | DeviceArray] = {}
    for name, value in out.items():
        if name not in outputs:
            raise InputError(f"out: {name!r} is not one of the plan's outputs {list(outputs)}")
        array = owned(f"out {name!r}", value, checked_array("out", outputs[name], value, take))
        if tuple(array.shape) != outputs[name].shape:
            raise InputError(f"out {name!r}: shape {tuple(array.shape)}, expected {outputs[name].shape}")
        if array.read_only if isinstance(array, DeviceArray) else not array.flags.writeable:
            raise InputError(f"out {name!r}: the array is read-only: give one that can be written")
        if layouts.overlaps(array.shape, tuple(map(abs, array.strides)), _step(array)):
            raise InputError(f"out {name!r}: elements of the array share memory")
        if other := next((other for other, taken in checked.items() if share_memory(array, taken)), None):
            raise InputError(f"out {name!r}: shares memory with what {other!r} is written into")
        checked[name] = array
    return checked


def _step(array: np.ndarray | DeviceArray) -> int:
    """The stride of elements that lie side by side."""
    return array.itemsize if isinstance(array, np.ndarray) else 1


def share_memory(one: np.ndarray | DeviceArray, other: np.ndarray | DeviceArray) -> bool:
    """Whether two arrays have bytes in common; of those on a GPU, whether they have between their ends."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one.address < other.address + other.span_nbytes and other.address < one.address + one.span_nbytes


def part(array: A, index: Index) -> A:
    """A view of a part of an array, which ``index`` gives with a start for every axis."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[index])
    offset = sum(of.start * stride for of, stride in zip(index, array.strides, strict=True))
    shape = tuple(of.stop - of.start for of in index)
    return replace(array, address=array.address + offset * ITEM_NBYTES[array.dtype], shape=shape)
