"""Early launches: the graph of a call is launched first, and its uploads wait until the host has filled their memory.

The host copies the arrays in parts, and counts them in a word of page-locked memory. Each part is uploaded once the
word says that it is there, while the host copies the next one. An upload that has waited too long, because another
thread delayed the host, leaves its part as it is, and the call launches its graph again.

An array that is in page-locked memory already is uploaded from there: the host only tells where it is.
"""

import platform
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nimblert.arrays import layouts
from nimblert.cuda import graph
from nimblert.cuda.driver import Context, Handle, PackedParameters, call
from nimblert.cuda.memory import DEFAULT_STREAM, allocate, host_bytes

_PTX = Path(__file__).with_name("early.ptx")
_BLOCK = 256
_BLOCK_NBYTES = _BLOCK * 4 * 16
_ALIGNMENT = 16
_PROGRESS_NBYTES = 16
_WORDS_NBYTES = 8
_ELSEWHERE = 1 << 31
"""Added to the number of parts: the host has written the addresses of the arrays."""

PART_NBYTES = 1 << 17
"""The size of a part."""

_LATEST_NS = 100_000
_SLOWEST_GBPS = 4
"""How long an upload waits: so long, and for the time of the copies before it at this rate."""

_REST = 256
_LONGEST_REST = 1 << 16
"""The calls after a late one that are not launched early, twice as many after each that follows: where threads hinder
each other, most would be late."""

_IN_ORDER = platform.machine() in {"x86_64", "AMD64"}
"""Whether other processors and devices see the stores of this one in order, as they must see arrays before the word."""


class Signal:
    """The word by which the host tells the uploads of one call at a time what it has filled, and their answer.

    A call has ``count`` arrays.
    """

    def __init__(self, context: Context, count: int) -> None:
        self._context = context
        self._nbytes = _WORDS_NBYTES + 8 * count
        self._progress: dict[int, int] = {}

    @cached_property
    def _address(self) -> int:
        return int(self._context.acquire(call("cuMemHostAlloc", self._nbytes, 0), "cuMemFreeHost"))

    @cached_property
    def _bytes(self) -> np.ndarray:
        return host_bytes(self._address, self._nbytes)

    @property
    def words(self) -> np.ndarray:
        """The number of parts that the host has filled, and whether an upload has given up waiting, as uint32."""
        return self._bytes[:_WORDS_NBYTES].view(np.uint32)

    @property
    def sources(self) -> np.ndarray:
        """The address of each array, as uint64, where it is not where its upload expects it."""
        return self._bytes[_WORDS_NBYTES:].view(np.uint64)

    @cached_property
    def _kernel(self) -> Handle:
        module = self._context.acquire(call("cuModuleLoadData", _PTX.read_bytes() + b"\0"), "cuModuleUnload")
        return call("cuModuleGetFunction", module, b"upload")

    def add_upload(self, built: Handle, dst: int, src: int, nbytes: int, index: int, first: int) -> Handle:
        """As `graph.add_upload`, of array ``index``, whose first part is number ``first``."""
        end = first + part_count(nbytes)
        source = self._address + _WORDS_NBYTES + 8 * index
        addresses = dst, src, self._address, source, self._progress_at(first)
        patience_ns = _LATEST_NS + end * PART_NBYTES // _SLOWEST_GBPS
        parameters = struct.pack("<QQQQQIIIII", *addresses, nbytes, PART_NBYTES, first, end, patience_ns)
        blocks = 1 + -(-nbytes // _BLOCK_NBYTES)
        return graph.add_kernel(built, self._kernel, (blocks, 1, 1), (_BLOCK, 1, 1), PackedParameters(parameters))

    def _progress_at(self, first: int) -> int:
        """The device memory that uploads from this part on use, one at a time."""
        if first not in self._progress:
            address = allocate(self._context, _PROGRESS_NBYTES)
            call("cuMemsetD8", address, 0, _PROGRESS_NBYTES)
            call("cuStreamSynchronize", DEFAULT_STREAM)
            self._progress[first] = address
        return self._progress[first]


class _Staged(NamedTuple):
    """Page-locked memory at ``address`` for an array.

    It is filled in ``parts``, its axes in this ``order``, or ``whole`` if it has none. Then ``end`` parts of the call
    are filled. ``is_plain``: whether it gets the bytes of an array as they lie in memory, so that the array can be
    uploaded in its place.
    """

    whole: np.ndarray
    address: int
    is_plain: bool
    order: tuple[int, ...]
    parts: Sequence[tuple[slice, np.ndarray]]
    end: int


class StagedArrays:
    """The page-locked memory for the arrays of a call. With a ``signal`` the graph may be launched before it is filled.

    ``words`` are those of the signal, to be 0 before each launch. ``rest`` is the number of calls, from the next on,
    that are launched once the memory is filled. ``in_place`` gives the address of an array that need not be copied.
    """

    def __init__(
        self, signal: Signal | None = None, in_place: Callable[[np.ndarray], int | None] = lambda _: None
    ) -> None:
        self._is_early = signal is not None
        self._in_place = in_place
        self.words = np.zeros(2, np.uint32) if signal is None else signal.words
        self._sources = np.zeros(0, np.uint64) if signal is None else signal.sources
        self.rest = inf if signal is None else 1  # the first launch of a graph takes the driver longer
        self._next_rest = _REST
        self._staged: list[_Staged] = []
        self._count = 0
        self._elsewhere = 0
        """`_ELSEWHERE` in a call with an array that is not copied."""

    def add(self, staged: np.ndarray, address: int, nbytes: int, *, is_plain: bool) -> int:
        """Stage arrays in memory of ``nbytes``, see `_Staged`; returns the number of the first part."""
        first, self._count = self._count, self._count + part_count(nbytes)
        is_plain = is_plain and self._is_early
        order, parts = _parts(staged) if is_plain and nbytes > PART_NBYTES else ((), ())
        self._staged.append(_Staged(staged, address, is_plain, order, parts, self._count))
        return first

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy the arrays of a call there, or tell where they are, and signal each part."""
        given: Sequence[np.ndarray | None] = arrays
        self._elsewhere = 0
        for each in arrays:
            if each.base is not None:
                given = self._copied(arrays)
                break
        words, filled = self.words, self._elsewhere
        for (whole, _, _, order, parts, end), array in zip(self._staged, given, strict=True):
            if parts and array is not None:
                flat = array.transpose(order).reshape(-1)
                for part, to in parts:
                    to[...] = flat[part]
                    filled += 1
                    words[0] = filled
            else:
                if array is not None:
                    whole[...] = array
                filled = self._elsewhere + end
                words[0] = filled

    def _copied(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray | None]:
        """Those that must be copied; None for one that is uploaded from where it is."""
        found = {}
        for index, each in enumerate(self._staged):
            address = self._in_place(arrays[index]) if each.is_plain else None
            if address is not None and not address % _ALIGNMENT:
                found[index] = address
        if not found:
            return arrays
        self._elsewhere = _ELSEWHERE
        self._sources[:] = [found.get(index, each.address) for index, each in enumerate(self._staged)]
        return [None if index in found else array for index, array in enumerate(arrays)]

    def came_late(self) -> bool:
        """Whether an upload gave up in the launch that has ended; if it is launched again, none will wait."""
        if not self.words[1]:
            if self.rest:
                self.rest -= 1
            else:
                self._next_rest = _REST
            return False
        self.words[:] = self._elsewhere + self._count, 0
        self.rest = self._next_rest
        self._next_rest = min(2 * self.rest, _LONGEST_REST)
        return True


def can_wait(dst: int, src: int) -> bool:
    """Whether an upload to this address from there can be launched early."""
    return _IN_ORDER and not (dst | src) % _ALIGNMENT


def part_count(nbytes: int) -> int:
    """The number of parts of an array."""
    return -(-nbytes // PART_NBYTES)


def _parts(staged: np.ndarray) -> tuple[tuple[int, ...], list[tuple[slice, np.ndarray]]]:
    """The order of the axes in memory, and the parts in that order: where each lies, and a view of it."""
    order = layouts.memory_order(staged.strides)
    flat = staged.transpose(order).reshape(-1)
    size = PART_NBYTES // staged.itemsize
    parts = [slice(start, start + size) for start in range(0, flat.size, size)]
    return order, [(part, flat[part]) for part in parts]
