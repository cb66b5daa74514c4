"""Host memory of a program: one aligned allocation for each region; weights stay in the mapped file."""

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from math import prod
from typing import NoReturn

import numpy as np

from nimblert.arrays import layouts
from nimblert.arrays.layouts import numpy_dtype
from nimblert.errors import DeviceMismatchError, InputError, PlanInvalidError
from nimblert.plan import ITEM_NBYTES, Plan, Pointer, Program, Region, Tensor, Weight
from nimblert.plan.container import Mapped

ALIGNMENT = 256
"""Bytes; a plan aligns its tensors no further."""

_READ_ALIGNMENT = 64
"""The alignment for vector instructions: weights with it are used in the mapped file, others are copied."""


class HostWeights:
    """The weights of a plan, read-only, in the mapped file."""

    def __init__(self, plan: Plan) -> None:
        self._offsets = [weight.offset for weight in plan.weights]
        self._weights = [_in_place(weight) for weight in plan.weights]
        self._mapped = {weight.data.obj for weight in plan.weights if isinstance(weight.data.obj, Mapped)}

    @contextmanager
    def rewritten(self, offsets: Iterable[int]) -> Iterator["HostWeights"]:
        """Yield these weights with new memory for those at ``offsets``, which is writable until the block ends."""
        made = copy(self)
        made._weights = list(self._weights)  # noqa: SLF001 - of its own class
        rewritten = [bisect_right(self._offsets, offset) - 1 for offset in offsets]
        for index in rewritten:
            made._weights[index] = allocate(self._weights[index].nbytes)  # noqa: SLF001
        yield made
        for index in rewritten:
            made._weights[index].flags.writeable = False  # noqa: SLF001

    def let_go(self) -> None:
        """Drop the pages of the file that were read; runs get those that they need back from the page cache."""
        for mapped in self._mapped:
            mapped.madvise(mmap.MADV_DONTNEED)

    def same(self, other: "HostWeights", offset: int) -> bool:
        """Return whether both have the byte at ``offset`` in the same memory."""
        return self.find(offset)[0] is other.find(offset)[0]

    def find(self, offset: int) -> tuple[np.ndarray, int]:
        """Return the weight that holds byte ``offset`` of the region, and the offset in it. Raises PlanInvalidError."""
        index = bisect_right(self._offsets, offset) - 1
        if index < 0:
            raise PlanInvalidError([f"weights: no weight holds byte {offset}"])
        return self._weights[index], offset - self._offsets[index]


class HostWorking:
    """The memory that the programs of a context share: the arena, which may be the caller's, and the state."""

    def __init__(self, plan: Plan, arena: np.ndarray | None = None, *, poison: bool = False) -> None:
        self.arena = allocate(plan.arena_nbytes, poison=poison) if arena is None else arena[: plan.arena_nbytes]
        self.state = allocate(plan.state_nbytes)
        self._initial = plan.state
        self.reset()

    def reset(self) -> None:
        """Restore the initial values of the state."""
        for part in self._initial:
            self.state[part.offset : part.offset + part.data.nbytes] = np.frombuffer(part.data, np.uint8)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Return a copy of ``nbytes`` bytes of the state, as uint8."""
        return self.state[offset : offset + nbytes].copy()

    def copy(self, tensor: Tensor) -> NoReturn:
        """Raise InputError: the state is not on a GPU."""
        raise InputError(f"state {tensor.name!r} is on the host, where the plan runs: read it as an array")

    def write(self, tensor: Tensor, array: np.ndarray) -> None:
        """Copy an array of the tensor's dtype and shape into a tensor of the state."""
        start = tensor.pointer.offset
        memory = self.state[start : start + tensor.span_nbytes].view(numpy_dtype(tensor.dtype))
        np.copyto(memory.reshape(tensor.shape), array)

    def take(self, value: object, ordinal: int, stream: int | None = None) -> NoReturn:
        """Raise InputError: arrays on a GPU are not taken."""
        del value, stream
        where = "a GPU" if ordinal < 0 else f"GPU {ordinal}"
        raise InputError(f"is on {where}, the plan runs on the CPU: give a copy on the host, .cpu() or .get()")

    def stream_handle(self, stream: object) -> None:
        """Raise InputError unless it is None: there are no streams to choose from."""
        if stream is not None:
            raise InputError("stream: a plan for the CPU takes none: leave it out")

    def close(self) -> None:
        """Do nothing: the memory is freed with its last user."""


class HostMemory:
    """The regions of a program as byte arrays. Every range handed out is within its region.

    Programs of a plan share ``weights``, and those of a context ``working``.
    """

    def __init__(self, program: Program, weights: HostWeights, working: HostWorking, *, poison: bool) -> None:
        regions = {(Region.ARENA, 0): working.arena, (Region.STATE, 0): working.state}
        regions |= {(Region.INPUT, i): allocate(n) for i, n in enumerate(program.input_nbytes)}
        regions |= {(Region.OUTPUT, i): allocate(n, poison=poison) for i, n in enumerate(program.output_nbytes)}
        self.regions = regions
        self._nothing = allocate(0)
        self._weights = weights

    def over(self, weights: HostWeights) -> "HostMemory":
        """Return the same memory with other weights."""
        made = copy(self)
        made._weights = weights  # noqa: SLF001 - of its own class
        return made

    def range(self, pointer: Pointer, nbytes: int, *, written: bool = False) -> np.ndarray:
        """Return ``nbytes`` bytes from ``pointer`` as uint8. Raises PlanInvalidError where there are not as many."""
        place = f"{pointer.region.name.lower()}({pointer.index})"
        if written and pointer.region is Region.INPUT:
            raise PlanInvalidError([f"{place}: is written, it may only be read"])
        if nbytes == 0:
            return self._nothing
        base, start = self._region(pointer)
        if written and not base.flags.writeable:
            raise PlanInvalidError([f"{place}: is written, it may only be read"])
        if start < 0 or start + nbytes > base.nbytes:
            raise PlanInvalidError([f"{place}: bytes {pointer.offset} to {pointer.offset + nbytes} are outside it"])
        return base[start : start + nbytes]

    def rebased(self, place: tuple[Region, int], memory: np.ndarray) -> "HostMemory":
        """Return this memory with one region elsewhere."""
        moved = copy(self)
        moved.regions = {**self.regions, place: memory}
        return moved

    def array(self, pointer: Pointer, dtype: str, shape: tuple[int, ...], *, written: bool = False) -> np.ndarray:
        """Return a tensor in C order that starts at ``pointer``."""
        nbytes = prod(shape) * ITEM_NBYTES[dtype]
        return self.range(pointer, nbytes, written=written).view(numpy_dtype(dtype)).reshape(shape)

    def tensor(self, tensor: Tensor) -> np.ndarray:
        """Return the strided view that a program's input or output is."""
        return layouts.strided(self.range(tensor.pointer, tensor.span_nbytes), tensor)

    def _region(self, pointer: Pointer) -> tuple[np.ndarray, int]:
        """Return the array that ``pointer`` lies in, and the offset there."""
        if pointer.region is not Region.WEIGHTS:
            if (pointer.region, pointer.index) not in self.regions:
                raise PlanInvalidError([f"{pointer.region.name.lower()}({pointer.index}): there is no such region"])
            return self.regions[pointer.region, pointer.index], pointer.offset
        return self._weights.find(pointer.offset)


def allocate(nbytes: int, *, poison: bool = False) -> np.ndarray:
    """Allocate aligned bytes, all zero or 0xFF; an empty array has an address too."""
    try:
        memory = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8) if poison else np.zeros(nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as exc:  # ValueError: more than an address can count
        raise DeviceMismatchError(f"the plan needs {nbytes} bytes of memory in one piece, more than is here") from exc
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def _in_place(weight: Weight) -> np.ndarray:
    """Return the bytes of a weight, read-only; a copy only where they are not aligned in the file."""
    data = np.frombuffer(weight.data, np.uint8)
    data.flags.writeable = False
    if data.nbytes == 0 or data.ctypes.data % _READ_ALIGNMENT == 0:
        return data
    aligned = allocate(data.nbytes)
    aligned[:] = data
    aligned.flags.writeable = False
    return aligned
