"""Zones of the bump allocator, over a driver that only hands out addresses."""

import pytest

from nimblec.cuda.recording import allocator
from nimblec.cuda.recording.allocator import STEP_NBYTES, Shift, Zone

BASE = 0x7F00_0000_0000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was mapped; each zone reserves its addresses elsewhere."""
    reserved: list[int] = []
    sizes: list[int] = []

    def call(api: str, *_: object) -> int:
        assert api == "cuMemAddressReserve"
        reserved.append(BASE + (len(reserved) << 40))
        return reserved[-1]

    monkeypatch.setattr(allocator, "call", call)
    monkeypatch.setattr(allocator, "_map", lambda _address, nbytes: sizes.append(nbytes))
    return sizes


def test_every_allocation_has_an_address_of_its_own() -> None:
    zone = Zone()
    addresses = [zone.allocate(n) for n in (0, 1, 512, 513, 0)]
    assert len(set(addresses)) == 5
    assert all(a % 512 == 0 for a in addresses)
    assert addresses == sorted(addresses) == zone.addresses
    assert zone.sizes == [0, 1, 512, 513, 0]


def test_a_freed_address_does_not_come_again_where_runs_are_recorded() -> None:
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


def test_memory_is_mapped_as_it_is_needed(mapped: list[int]) -> None:
    zone = Zone()
    zone.allocate(16)
    assert len(mapped) == 1
    zone.allocate(3 * mapped[0])
    assert sum(mapped) >= 3 * mapped[0]


def test_an_address_belongs_to_the_allocation_below_it() -> None:
    zone = Zone()
    a, b = zone.allocate(100), zone.allocate(0)
    assert [zone.find(x) for x in (a - 1, a, a + 99, a + 100, b, b + 1)] == [None, 0, 0, None, 1, None]


def test_two_zones_differ_by_another_distance_for_each_allocation() -> None:
    first, second = Zone(), Zone(first_offset=0x1234_5600, gap_nbytes=STEP_NBYTES)
    pairs = [(first.allocate(n), second.allocate(n)) for n in (512, 1, 5 * MIB, 0, 7)]
    assert [b - a for a, b in pairs] == [second.base - first.base + i * STEP_NBYTES for i in range(5)]
    shift = Shift(first.addresses, second.base - first.base)
    assert [shift.locate(a + 8, b + 8) for a, b in pairs] == [(i, 8) for i in range(5)]
