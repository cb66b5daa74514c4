"""Calls of sizes that no program is for, as `nimblert.calls.sizes` serves them: one padded run, or several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nimblert.arrays.device_arrays import DeviceArray, DeviceOutput
from nimblert.calls.backend import Backend
from nimblert.calls.outputs import check_apart, no_memory, share_memory, written_into
from nimblert.calls.sizes import Index, Served
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Program

A = TypeVar("A", np.ndarray, DeviceArray)


def check_parts(
    served: Served, arrays: Sequence[Any], out: Mapping[str, Any], backends: Mapping[str, Backend]
) -> None:
    """Raise InputError where a run of a call would write what it may not: another output, or an input of a later run.

    ``backends`` are those of each program by name.
    """
    programs = served.first.program, served.last.program
    for program in programs:
        check_apart(out, program, backends[program.name])
    if served.count == 1:
        return
    later = f"which is read after a part of the output was written where a call is {served.count} runs"
    for name, mine in out.items():
        if any(share_memory(mine, array) for array in arrays):
            raise InputError(f"out {name!r}: shares memory with an input, {later}: give it memory of its own")
    for tensor, array in zip(served.first.program.inputs, arrays, strict=True):
        for program in programs:
            if output := written_into(array, program, backends[program.name]):
                raise InputError(
                    f"input {tensor.name!r}: shares memory with what {output!r} is written into, {later}: give a copy"
                )


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

    Several runs write parts of the same arrays: those in ``out``, else new ones. `check_parts` has checked them.
    ``backend_of`` loads a program.
    """
    if served.count == 1:
        run = served.last
        return backend_of(run.program).call(
            arrays, out, reuse_outputs=reuse_outputs, shapes=run.shapes, stream=stream
        )
    backend = backend_of(served.first.program)
    on_device = stream is not None or any(isinstance(array, DeviceArray) for array in arrays)
    empty = partial(backend.empty, on_device=on_device, stream=stream)
    try:
        whole = {t.name: out[t.name] if t.name in out else empty(t) for t in served.outputs}
    except (MemoryError, ValueError) as exc:  # ValueError: more than an address can count
        raise no_memory(exc) from exc
    for run, taken, given in served.runs:
        inputs = [part(array, index) for array, index in zip(arrays, taken, strict=True)]
        outputs = {name: part(whole[name], index) for name, index in zip(whole, given, strict=True)}
        backend_of(run.program).call(inputs, outputs, reuse_outputs=False, shapes=run.shapes, stream=stream)
    return {name: DeviceOutput(a) if isinstance(a, DeviceArray) else a for name, a in whole.items()}


def part(array: A, index: Index) -> A:
    """A view of a part of an array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[index])
    taken = [range(*of.indices(size)) for of, size in zip(index, array.shape, strict=True)]
    offset = sum(of.start * stride for of, stride in zip(taken, array.strides, strict=True))
    return replace(array, address=array.address + offset * ITEM_NBYTES[array.dtype], shape=tuple(map(len, taken)))
