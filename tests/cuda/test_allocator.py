"""Zones of the bump allocator, over a driver that only hands out addresses."""

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch

from nimblec.cuda.capture import allocator
from nimblec.cuda.capture.allocator import STEP_NBYTES, BumpAllocator, Shift, Zone
from nimblert.errors import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable

BASE = 0x7F00_0000_0000
MIB = 1 << 20


class Memory:
    """What is mapped, as (address, nbytes); ``failing`` once no more can be."""

    def __init__(self) -> None:
        self.mapped: list[tuple[int, int]] = []
        self.reserved = 0
        self.synchronized = 0
        self.failing = False

    def call(self, api: str, *arguments: int) -> int | None:
        """Return the driver's functions but those that map; each zone reserves its addresses elsewhere."""
        if api == "cuMemAddressReserve":
            self.reserved += 1
            return BASE + (self.reserved << 40)
        if api == "cuMemUnmap":
            self.mapped.remove((arguments[0], arguments[1]))
        elif api == "cuCtxSynchronize":
            self.synchronized += 1
        else:
            assert api in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
        return None

    def map(self, address: int, nbytes: int) -> None:
        """Map memory, where there is none."""
        if self.failing:
            raise CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        assert all(address >= at + n or address + nbytes <= at for at, n in self.mapped)
        self.mapped.append((address, nbytes))

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether all of a range is mapped."""
        ends = address, address + max(nbytes, 1) - 1
        return all(any(at <= end < at + n for at, n in self.mapped) for end in ends)

    @property
    def nbytes(self) -> int:
        """The bytes that are mapped."""
        return sum(nbytes for _, nbytes in self.mapped)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Return the driver's memory."""
    found = Memory()
    monkeypatch.setattr(allocator, "call", found.call)
    monkeypatch.setattr(allocator, "_map", found.map)
    return found


def test_every_allocation_has_an_address_of_its_own() -> None:
    zone = Zone()
    addresses = [zone.allocate(n) for n in (0, 1, 512, 513, 0)]
    assert len(set(addresses)) == 5
    assert all(a % 512 == 0 for a in addresses)
    assert addresses == sorted(addresses) == zone.addresses
    assert zone.sizes == [0, 1, 512, 513, 0]


def test_allocator_reuses_no_freed_address() -> None:
    zone = Zone()
    first = zone.allocate(4 * MIB)
    zone.free(first)
    assert zone.allocate(4 * MIB) != first
    assert first not in zone.live


def test_large_allocations_are_recycled_elsewhere() -> None:
    zone = Zone(recycles=True)
    large, small = zone.allocate(4 * MIB), zone.allocate(64)
    zone.free(large)
    zone.free(large)  # once is enough
    zone.free(small)
    assert zone.allocate(4 * MIB) == large
    assert zone.allocate(4 * MIB) != large
    assert zone.allocate(64) != small
    assert large in zone.live
    assert zone.find(large + MIB) == 0


def test_memory_is_mapped_as_it_is_needed(memory: Memory) -> None:
    zone = Zone(first_offset=0x1234_5600)
    small = zone.allocate(16)
    chunk = memory.nbytes
    assert memory.holds(small, 16)
    assert chunk <= 64 * MIB
    zone.allocate(16)
    assert memory.nbytes == chunk
    large = zone.allocate(3 * chunk)
    assert memory.holds(large, 3 * chunk)
    assert memory.nbytes == 4 * chunk


def test_memory_without_anything_live_is_released_and_comes_back(memory: Memory) -> None:
    zone = Zone()
    kept = zone.allocate(16)
    chunk = memory.nbytes
    across = zone.allocate(2 * chunk)
    last = zone.allocate(16)
    zone.free(across)
    assert memory.nbytes == 3 * chunk
    zone.release()
    assert memory.holds(kept, 16)
    assert memory.holds(last, 16)
    assert memory.nbytes == 2 * chunk
    zone.restore()
    assert memory.holds(across, 2 * chunk)
    assert zone.find(across + 1) == 1
    zone.free(last)
    zone.free(kept)
    zone.release()
    assert memory.nbytes == 0
    assert memory.holds(new := zone.allocate(16), 16)
    assert new > last


def test_recycled_memory_that_was_released_is_mapped_again(memory: Memory) -> None:
    zone = Zone(recycles=True)
    large = zone.allocate(200 * MIB)
    zone.free(large)
    zone.release()
    assert not memory.nbytes
    assert zone.allocate(200 * MIB) == large
    assert memory.holds(large, 200 * MIB)
    zone.release()
    assert memory.holds(large, 200 * MIB)


class Torch:
    """Torch's side of an allocator: it has function pointers, and calls `BumpAllocator.release` by the last one."""

    def __init__(self, malloc: int, free: int) -> None:
        integer, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._malloc = ctypes.CFUNCTYPE(integer, integer, ctypes.c_int, pointer)(malloc)
        self._free = ctypes.CFUNCTYPE(None, integer, integer, ctypes.c_int, pointer)(free)
        self.empty_cache: Callable[[], None]

    def set_reset_fn(self, reset: int) -> None:
        """Store what torch.cuda.empty_cache calls."""
        self.empty_cache = ctypes.CFUNCTYPE(None)(reset)

    def allocate(self, nbytes: int) -> int:
        """Allocate on the first device and the default stream."""
        return int(self._malloc(nbytes, 0, None))

    def free(self, address: int, nbytes: int) -> None:
        """Free what `allocate` returned."""
        self._free(address, nbytes, 0, None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> tuple[BumpAllocator, Torch]:
    """Return an allocator, and torch that uses it."""
    current: list[Torch] = []
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", Torch, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_changeCurrentAllocator", current.append, raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    found = BumpAllocator()
    found.install()
    return found, current[0]


def test_an_emptied_cache_releases_memory(installed: tuple[BumpAllocator, Torch], memory: Memory) -> None:
    whole, using = installed
    kept, freed = using.allocate(16), using.allocate(512 * MIB)
    using.free(freed, 512 * MIB)
    before = memory.nbytes
    using.empty_cache()
    assert memory.nbytes <= before - 448 * MIB
    assert memory.synchronized == 1
    assert memory.holds(kept, 16)
    memory.failing = True
    assert using.allocate(512 * MIB) == 0
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        whole.check()


def test_nothing_is_released_while_a_recording_is_made(installed: tuple[BumpAllocator, Torch], memory: Memory) -> None:
    whole, using = installed
    zone, _, _ = whole.zone_pair()
    with whole.allocating_in(zone):
        using.free(using.allocate(64 * MIB), 64 * MIB)
        before = memory.nbytes
        using.empty_cache()
        with whole.allocating_in(whole.resident):
            using.empty_cache()
        using.empty_cache()
        assert (memory.nbytes, memory.synchronized) == (before, 0)
    using.empty_cache()
    assert not memory.nbytes
    whole.check()


def test_an_address_belongs_to_the_allocation_below_it() -> None:
    zone = Zone()
    a, b = zone.allocate(100), zone.allocate(0)
    assert [zone.find(x) for x in (a - 1, a, a + 99, a + 100, b, b + 1)] == [None, 0, 0, None, 1, None]


def test_allocator_zones_differ_per_allocation() -> None:
    first, second = Zone(), Zone(first_offset=0x1234_5600, gap_nbytes=STEP_NBYTES)
    pairs = [(first.allocate(n), second.allocate(n)) for n in (512, 1, 5 * MIB, 0, 7)]
    assert [b - a for a, b in pairs] == [second.base - first.base + i * STEP_NBYTES for i in range(5)]
    shift = Shift(first.addresses, second.base - first.base)
    assert [shift.locate(a + 8, b + 8) for a, b in pairs] == [(i, 8) for i in range(5)]
