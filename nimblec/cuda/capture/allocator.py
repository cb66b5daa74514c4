"""A bump allocator under torch: every allocation is a buffer with a unique address.

No memory is reused inside a zone while it is recorded, so an address identifies its allocation. Two
captures run in two zones whose i-th allocations are ``shift + i * step`` bytes apart, a different
distance for each i: so the difference of a pointer between captures identifies its target.
"""

import ctypes
import enum
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nimblert.cuda.driver import Handle, bindings, call
from nimblert.errors import CudaError

_ALIGNMENT = 512
_CHUNK_NBYTES = 32 << 20
_RESERVED_NBYTES = 512 << 30
_RECYCLED_NBYTES = 1 << 20

STEP_NBYTES = 3 * _ALIGNMENT
"""The growth, per allocation, of the distance between two zones."""


class Place(enum.Enum):
    """Where an allocation is: in a capture's zone, in an earlier zone, or outside torch's allocator."""

    CAPTURE = "capture"
    EARLIER = "earlier"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Byte ``offset`` of the ``index``-th allocation of a place."""

    index: int
    offset: int
    place: Place = Place.CAPTURE


class Zone:
    """A range of addresses that is backed with memory, chunk by chunk, as it is allocated.

    ``addresses`` and ``sizes`` list the allocations in order; ``live`` are those not yet freed. With
    ``recycles``, for a zone that is not recorded, large freed allocations are reused.
    """

    def __init__(self, *, first_offset: int = 0, gap_nbytes: int = 0, recycles: bool = False) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.live: set[int] = set()
        self._gap_nbytes = gap_nbytes
        self._recycles = recycles
        self._freed: defaultdict[int, list[int]] = defaultdict(list)  # addresses by size
        self._reserved = int(call("cuMemAddressReserve", _RESERVED_NBYTES, 0, 0, 0))
        self._backed: set[int] = set()  # numbers of chunks
        self._live_in: Counter[int] = Counter()  # live allocations by chunk
        self.base = self._cursor = self._reserved + first_offset

    @property
    def end(self) -> int:
        """One past the last reserved address."""
        return self._reserved + _RESERVED_NBYTES

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` new bytes. Torch may ask for 0, and frees that address too."""
        # Other tensors may be freed while memory is mapped.
        address = self._take(nbytes)
        self._live_in.update(self._chunks(address, nbytes))
        try:
            self._back(address, nbytes)
        except BaseException:
            self.free(address)
            raise
        return address

    def _take(self, nbytes: int) -> int:
        """Return an address that was freed, or a new one; it is live."""
        if self._freed[nbytes]:
            address = self._freed[nbytes].pop()
        else:
            address = self._cursor
            self._cursor += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT + self._gap_nbytes
            self.addresses.append(address)
            self.sizes.append(nbytes)
        self.live.add(address)
        return address

    def free(self, address: int) -> None:
        """Mark the allocation at ``address`` as freed; its memory stays until `release`."""
        index = self.find(address)
        if index is None or address not in self.live:
            return
        nbytes = self.sizes[index]
        self.live.discard(address)
        self._live_in.subtract(self._chunks(address, nbytes))
        if self._recycles and nbytes >= _RECYCLED_NBYTES:
            self._freed[nbytes].append(address)

    def find(self, address: int) -> int | None:
        """Return the index of the allocation that holds ``address``."""
        index = bisect_right(self.addresses, address) - 1
        if index < 0 or address >= self.addresses[index] + max(self.sizes[index], 1):
            return None
        return index

    def release(self) -> None:
        """Return the memory of all chunks in which nothing is live to the driver. Nothing on the GPU may use it now."""
        for chunk in [chunk for chunk in self._backed if not self._live_in[chunk]]:
            call("cuMemUnmap", self._reserved + chunk * _CHUNK_NBYTES, _CHUNK_NBYTES)
            self._backed.discard(chunk)

    def restore(self) -> None:
        """Back all allocations with memory again, freed ones too; that of released chunks has no known contents."""
        for address, nbytes in zip(self.addresses, self.sizes, strict=True):
            self._back(address, nbytes)

    def _back(self, address: int, nbytes: int) -> None:
        """Back ``nbytes`` from ``address`` on with memory, where they have none."""
        for chunk in self._chunks(address, nbytes):
            if chunk not in self._backed:
                _map(self._reserved + chunk * _CHUNK_NBYTES, _CHUNK_NBYTES)
                self._backed.add(chunk)

    def _chunks(self, address: int, nbytes: int) -> range:
        """Return the chunks that ``nbytes`` from ``address`` on lie in."""
        first = (address - self._reserved) // _CHUNK_NBYTES
        return range(first, (address + max(nbytes, 1) - 1 - self._reserved) // _CHUNK_NBYTES + 1)


def _map(address: int, nbytes: int) -> None:
    """Back a reserved range with device memory."""
    driver = bindings()
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    memory: Handle = call("cuMemCreate", nbytes, properties, 0)
    try:
        call("cuMemMap", address, nbytes, 0, memory, 0)
    finally:
        # The mapping keeps the memory.
        call("cuMemRelease", memory)
    try:
        call("cuMemSetAccess", address, nbytes, [access], 1)
    except CudaError:
        call("cuMemUnmap", address, nbytes)
        raise


_Malloc = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Reset = ctypes.CFUNCTYPE(None)


class BumpAllocator:
    """Torch's device allocator for this process, from `install` on.

    ``resident`` serves all allocations outside a recording. ``error`` is an exception that a callback
    could not raise through torch's C++ frames. ``torch.cuda.empty_cache`` calls `release`.
    """

    def __init__(self) -> None:
        self.resident: Zone
        self._zones: list[Zone] = []
        self._current: Zone
        self.error: BaseException | None = None
        self._recording = False
        self._callbacks = (_Malloc(self._malloc), _Free(self._free), _Reset(self._reset))

    def install(self) -> None:
        """Make torch allocate here; must come before torch initialises CUDA."""
        import torch

        malloc, free, reset = (ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self._callbacks)
        allocator: Any = torch._C._cuda_customAllocator(malloc, free)
        allocator.set_reset_fn(reset)
        torch._C._cuda_changeCurrentAllocator(allocator)
        torch.cuda.init()
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
        self.resident = self._current = Zone(recycles=True)
        self._zones.append(self.resident)

    def zone_pair(self) -> tuple[Zone, Zone, int]:
        """Return two zones for two captures, and the distance of their first allocations.

        Its low 32 bits are not zero: else an int beside half of a stale pointer would look like an
        address that moved.
        """
        first = Zone()
        second = Zone(first_offset=0x1234_5600, gap_nbytes=STEP_NBYTES)
        self._zones += (first, second)
        return first, second, second.base - first.base

    @property
    def zones(self) -> tuple[Zone, ...]:
        """All zones so far."""
        return tuple(self._zones)

    @contextmanager
    def allocating_in(self, zone: Zone) -> Iterator[None]:
        """Serve allocations from ``zone`` inside the block, which records: no memory is released there."""
        before = self._current, self._recording
        self._current, self._recording = zone, True
        try:
            yield
        finally:
            self._current, self._recording = before

    def release(self) -> None:
        """Return memory in which nothing is live to the driver, unless a recording is being made.

        Captured graphs that use such memory cannot be replayed from then on: see `Zone.restore`.
        """
        if self._recording:
            return
        call("cuCtxSynchronize")
        for zone in self._zones:
            zone.release()

    def _malloc(self, nbytes: int, _device: int, _stream: int) -> int:
        try:
            return self._current.allocate(nbytes)
        except BaseException as exc:  # noqa: BLE001 - torch's C++ frames cannot carry it: raised by check()
            self.error = self.error or exc
            return 0

    def _free(self, address: int, _nbytes: int, _device: int, _stream: int) -> None:
        for zone in self._zones:
            if zone.base <= address < zone.end:
                zone.free(address)

    def _reset(self) -> None:
        try:
            self.release()
        except BaseException as exc:  # noqa: BLE001 - as above
            self.error = self.error or exc

    def check(self) -> None:
        """Raise the error of a callback, if there was one."""
        if self.error is not None:
            raise self.error


class Shift:
    """The distances between the allocations of two zones.

    ``shift`` bytes for the first, `STEP_NBYTES` more for each one after it.
    """

    def __init__(self, first: Sequence[int], shift: int) -> None:
        self._addresses = first
        self._shift = shift

    def locate(self, in_first: int, in_second: int) -> tuple[int, int] | None:
        """Return the (allocation, offset) that a word points to, from its values in two captures.

        The offset may be negative or beyond the end: a biased pointer. None for a word that did not
        move like any allocation.
        """
        index, rest = divmod((in_second - in_first) - self._shift, STEP_NBYTES)
        if rest or not 0 <= index < len(self._addresses):
            return None
        return index, in_first - self._addresses[index]
