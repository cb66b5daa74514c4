"""Calls of sizes that no program is for, as `nimblert.calls.sizes` serves them: one padded run, or several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.calls.backend import Backend
from nimblert.calls.outputs import share_memory
from nimblert.calls.sizes import Index, Served
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Program

A = TypeVar("A", np.ndarray, DeviceArray)


def serve(
    served: Served,
    arrays: Sequence[Any],
    out: Mapping[str, Any],
    backend_of: Callable[[Program], Backend],
    *,
    reuse_outputs: bool,
    stream: int | None,
) -> dict[str, Any]:
    """Run a call: its outputs by name, without those that arrays of the caller in ``out`` take if it is one run.

    Several runs write parts of the same arrays: those in ``out``, else new ones. ``backend_of`` loads a program.
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


def part(array: A, index: Index) -> A:
    """A view of a part of an array, which ``index`` gives with a start for every axis."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[index])
    offset = sum(of.start * stride for of, stride in zip(index, array.strides, strict=True))
    shape = tuple(of.stop - of.start for of in index)
    return replace(array, address=array.address + offset * ITEM_NBYTES[array.dtype], shape=shape)
