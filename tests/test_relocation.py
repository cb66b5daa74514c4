"""Pointers told from numbers by their words in two captures; no GPU is needed for that."""

import struct
from types import SimpleNamespace

import pytest

from nimblec.cuda import relocation
from nimblec.cuda.allocator import STEP_NBYTES, Shift
from nimblec.cuda.inductor import _accesses
from nimblec.cuda.relocation import Relocator, Target
from nimblec.errors import UnsupportedModelError

FIRST = [0x7F00_0000_0000, 0x7F00_0000_0400, 0x7F00_0000_2000]
SHIFT = (600 << 30) + 0x1234_5600
SECOND = [address + SHIFT + i * STEP_NBYTES for i, address in enumerate(FIRST)]
RESIDENT = 0x7E00_0000_0000


class _Resident:
    """One live and one freed allocation of 512 bytes."""

    base, end = RESIDENT, RESIDENT + (1 << 30)
    addresses = (RESIDENT, RESIDENT + 512)
    live = frozenset({RESIDENT})

    def find(self, address: int) -> int | None:
        return (address - RESIDENT) // 512 if RESIDENT <= address < RESIDENT + 1024 else None


@pytest.fixture
def relocator(monkeypatch: pytest.MonkeyPatch) -> Relocator:
    registered = {0x7D00_0000_0000}
    monkeypatch.setattr(Relocator, "_is_registered", lambda _self, address: address in registered)
    return Relocator(Shift(FIRST, SHIFT), _Resident())  # type: ignore[arg-type]


def _pack(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)


def test_a_word_that_moved_with_an_allocation_points_to_it(relocator: Relocator) -> None:
    found = relocator.relocate(_pack(FIRST[0], 7, FIRST[2] + 64), _pack(SECOND[0], 7, SECOND[2] + 64))
    assert found.targets == ((0, Target(index=0, offset=0)), (16, Target(index=2, offset=64)))
    assert found.params == _pack(0, 7, 0)


@pytest.mark.parametrize("bias", [-4096, 1 << 20])
def test_a_biased_pointer_is_named_by_how_far_it_moved(relocator: Relocator, bias: int) -> None:
    found = relocator.relocate(_pack(FIRST[1] + bias), _pack(SECOND[1] + bias))
    assert found.targets == ((0, Target(index=1, offset=bias)),)


def test_padding_loses_only_the_bytes_that_differ(relocator: Relocator) -> None:
    # A dtype of one byte, three bytes of padding, a float.
    first = struct.pack("<B3sf", 11, b"\x10\x20\x30", 1.0)
    second = struct.pack("<B3sf", 11, b"\x99\x20\x31", 1.0)
    found = relocator.relocate(first, second)
    assert found.targets == ()
    assert found.params == struct.pack("<B3sf", 11, b"\x00\x20\x00", 1.0)


def test_an_int_beside_a_stale_half_pointer_is_no_pointer(relocator: Relocator) -> None:
    stale = [address >> 32 for address in (FIRST[0], SECOND[0])]
    found = relocator.relocate(_pack(42 | stale[0] << 32), _pack(42 | stale[1] << 32))
    assert found.targets == ()
    assert found.params[:4] == (42).to_bytes(4, "little")


def test_the_tail_of_odd_parameters_is_kept(relocator: Relocator) -> None:
    assert relocator.relocate(b"\x01\x02\x03", b"\x01\x05\x03").params == b"\x01\x00\x03"


def test_a_word_that_stayed_may_be_resident(relocator: Relocator) -> None:
    found = relocator.relocate(_pack(RESIDENT + 8, RESIDENT + 520, 5), _pack(RESIDENT + 8, RESIDENT + 520, 5))
    assert found.targets == ((0, Target(index=0, offset=8, resident=True)),)
    assert found.params == _pack(0, RESIDENT + 520, 5)  # the second one was freed: a number, or padding


def test_memory_outside_the_allocator_is_refused(relocator: Relocator) -> None:
    word = _pack(0x7D00_0000_0000)
    with pytest.raises(UnsupportedModelError, match="outside torch's allocator"):
        relocator.relocate(word, word)


def test_an_address_must_be_one(relocator: Relocator) -> None:
    assert relocator.locate(FIRST[1], SECOND[1]) == Target(index=1, offset=0)
    with pytest.raises(UnsupportedModelError, match="did not allocate"):
        relocator.locate(FIRST[1], SECOND[1] + 8)


def test_the_shift_of_every_allocation_is_its_own() -> None:
    assert len({b - a for a, b in zip(FIRST, SECOND, strict=True)}) == len(FIRST)
    assert Shift(FIRST, SHIFT).locate(FIRST[2], SECOND[2] + STEP_NBYTES) is None


def test_registered_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(relocation, "call", lambda *args: asked.append(args))
    monkeypatch.setattr(
        relocation,
        "bindings",
        lambda: SimpleNamespace(CUpointer_attribute=SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2)),
    )
    relocator = Relocator(Shift(FIRST, SHIFT), _Resident())  # type: ignore[arg-type]
    word = _pack(0x7C00_0000_0000)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            relocator.relocate(word, word)
    assert len(asked) == 1


def test_the_names_of_a_generated_kernel_tell_what_it_writes() -> None:
    torch = pytest.importorskip("torch")
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    names = ("in_ptr0", "out_ptr0", "in_out_ptr0", "table_ptr", "xnumel", "XBLOCK")
    reads, writes = _accesses(names, {"table_ptr"}, (a, b, c, d, 16))
    assert [id(t) for t in reads] == [id(a), id(c), id(d)]
    assert [id(t) for t in writes] == [id(b), id(c), id(d)]
