"""Arrays of the caller that take the outputs of a call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.device_arrays import DeviceOutput
from nimblert.arrays.dlpack import DeviceArray
from nimblert.calls.backend import Backend
from nimblert.calls.entries import Take, array_of_shape
from nimblert.calls.sizes import Index, Served
from nimblert.errors import InputError
from nimblert.plan import ITEM_NBYTES, Program, Tensor
from nimblert.plan.dimensions import Shape


def checked_out(tensors: Sequence[Tensor], out: Mapping[str, Any], take: Take) -> dict[str, np.ndarray | DeviceArray]:
    """Return the arrays of the caller for outputs, by name. Raises InputError where one cannot take its output."""
    outputs = {tensor.name: tensor for tensor in tensors}
    checked: dict[str, np.ndarray | DeviceArray] = {}
    for name, value in out.items():
        if name not in outputs:
            raise InputError(f"out: {name!r} is not one of the plan's outputs {list(outputs)}")
        array = array_of_shape("out", outputs[name], value, take)
        if array.read_only if isinstance(array, DeviceArray) else not array.flags.writeable:
            raise InputError(f"out {name!r}: the array is read-only: give one that can be written")
        step = array.itemsize if isinstance(array, np.ndarray) else 1
        if layouts.overlaps(array.shape, tuple(map(abs, array.strides)), step):
            raise InputError(f"out {name!r}: elements of the array share memory")
        if other := next((other for other, taken in checked.items() if share_memory(array, taken)), None):
            raise InputError(f"out {name!r}: shares memory with what {other!r} is written into")
        checked[name] = array
    return checked


def check_apart(taken: Mapping[str, np.ndarray | DeviceArray], program: Program, backend: Backend) -> None:
    """Raise InputError where an array for one output shares memory that a run writes another one into."""
    for name, array in taken.items():
        if other := written_into(array, program, backend, but=name):
            raise InputError(
                f"out {name!r}: shares memory with what {other!r} is written into: give it memory of its own"
            )


def written_into(
    array: np.ndarray | DeviceArray, program: Program, backend: Backend, but: str | None = None
) -> str | None:
    """Return the name of an output that a run writes into memory of an array, if any ``but`` this one."""
    for tensor, on_host in zip(program.outputs, backend.outputs, strict=True):
        if tensor.name == but:
            continue
        if isinstance(array, DeviceArray):
            start = backend.address(tensor)
            is_shared = array.span.start < start + tensor.span_nbytes and start < array.span.stop
        else:
            is_shared = np.shares_memory(array, on_host)
        if is_shared:
            return tensor.name
    return None


def share_memory(one: np.ndarray | DeviceArray, other: np.ndarray | DeviceArray) -> bool:
    """Return whether two arrays share bytes; on a GPU, whether their address ranges overlap."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one.span.start < other.span.stop and other.span.start < one.span.stop


def filled(arrays: Mapping[str, Any], sizes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the parts of output arrays that a run filled, as views; ``sizes`` are those of outputs that it cropped."""
    found = dict(arrays)
    for name in arrays.keys() & sizes.keys():
        array, shape = arrays[name], sizes[name]
        found[name] = array.head(shape) if isinstance(array, DeviceOutput) else array[tuple(map(slice, shape))]
    return found


def checked_sizes(output: Tensor, sizes: Sequence[int]) -> Shape:
    """Return the sizes that a run gave to an output. Raises InputError where they are not within the plan's bound."""
    if not all(0 <= size <= most for size, most in zip(sizes, output.shape, strict=True)):
        raise InputError(
            f"output {output.name!r}: has the shape {tuple(sizes)} for these inputs, and the plan's bound is "
            f"{output.shape}: compile with a larger --bound {output.name}={'x'.join(map(str, sizes))}"
        )
    return tuple(sizes)


def no_memory(exc: Exception) -> InputError:
    """Return the error to raise where a new array for an output cannot be made."""
    return InputError(f"outputs: a new array needs more memory than there is: {exc}: give one as out=")


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


def run_parts(
    served: Served,
    arrays: Sequence[Any],
    out: Mapping[str, Any],
    backends: Mapping[str, Backend],
    *,
    stream: int | None,
) -> dict[str, Any]:
    """Run a call in several parts, and return its outputs by name, arrays of ``out`` among them.

    The parts are written into the same arrays: those in ``out``, else new ones. `check_parts` has checked them.
    """
    backend = backends[served.first.program.name]
    on_device = stream is not None or any(isinstance(array, DeviceArray) for array in arrays)
    empty = partial(backend.empty, on_device=on_device, stream=stream)
    try:
        whole = {t.name: out[t.name] if t.name in out else empty(t) for t in served.outputs}
    except (MemoryError, ValueError) as exc:  # ValueError: more than an address can count
        raise no_memory(exc) from exc
    for run, taken, given in served.runs:
        inputs = [part(array, index) for array, index in zip(arrays, taken, strict=True)]
        outputs = {name: part(whole[name], index) for name, index in zip(whole, given, strict=True)}
        prepared = backends[run.program.name].prepare(inputs, run.shapes)
        prepared.run_into(inputs, outputs, reuse_outputs=False, stream=stream)
    return {name: DeviceOutput(a) if isinstance(a, DeviceArray) else a for name, a in whole.items()}


def part(array: A, index: Index) -> A:
    """Return a view of a part of an array."""
    if isinstance(array, np.ndarray):
        return np.asarray(array[index])
    taken = [range(*of.indices(size)) for of, size in zip(index, array.shape, strict=True)]
    offset = sum(of.start * stride for of, stride in zip(taken, array.strides, strict=True))
    return replace(array, address=array.address + offset * ITEM_NBYTES[array.dtype], shape=tuple(map(len, taken)))
