"""Listing the kernels of a cubin, and cutting it down to some of them."""

import struct
from pathlib import Path

import pytest
from cubin_meaning import ALLOC, NOBITS, kernels, meaning, sections
from cubin_patching import header_of, linked_by_cuda_12_3, patched
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nimblec.base.errors import CompileError
from nimblec.cuda.capture.cubin_cut import cut
from nimblec.cuda.capture.cubin_reading import entry_symbols, parameters
from nimblec.cuda.capture.elf import UnfamiliarCubinError
from nimblert.errors import PlanFormatError
from nimblert.plan import Parameter

CUBINS = {path.name: path.read_bytes() for path in sorted(Path(__file__).parents[1].glob("data/kernels.*.cubin"))}
LINKED = "kernels.sm_90a.linked.cubin"
OLD = "kernels.sm_90.cuda12.cubin"
KERNELS = {
    "scale", "nested", "indirect", "reverse", "reverse_dynamic", "visit", "local", "say",
    "_Z8increaseIfEvPT_", "_Z8increaseIdEvPT_",
}  # fmt: skip

LOCAL, GLOBAL = 0, 1

any_cubin = pytest.mark.parametrize("cubin", CUBINS.values(), ids=CUBINS)
each_cubin = st.sampled_from(sorted(CUBINS))


def program_headers(cubin: bytes) -> list[tuple[int, ...]]:
    """Return (type, flags, offset, bytes in the file, bytes in memory)."""
    phoff, phnum = struct.unpack_from("<Q", cubin, 32)[0], struct.unpack_from("<H", cubin, 56)[0]
    rows = struct.iter_unpack("<IIQQQQQQ", cubin[phoff : phoff + 56 * phnum])
    return [(kind, flags, offset, filesz, memsz) for kind, flags, offset, _, _, filesz, memsz, _ in rows]


def symbol_split(cubin: bytes) -> tuple[int, list[int]]:
    """Return ``sh_info`` of the symbol table and the binding of each symbol."""
    table = next(row for row in sections(cubin) if row["type"] == 2)
    return table["info"], [info >> 4 for _, info, *_ in struct.iter_unpack("<IBBHQQ", table["content"])]


def bindings_before_a_global(bindings: list[int]) -> int:
    return bindings.index(GLOBAL) if GLOBAL in bindings else len(bindings)


@any_cubin
def test_cubin_entries_are_kernels(cubin: bytes) -> None:
    assert entry_symbols(cubin) == KERNELS == kernels(cubin)
    assert entry_symbols(memoryview(cubin)) == KERNELS


@any_cubin
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_cut_says_of_its_kernel_what_the_whole_said(cubin: bytes, kernel: str) -> None:
    part = cut(cubin, {kernel})
    assert entry_symbols(part) == {kernel}
    assert meaning(part, {kernel}) == meaning(cubin, {kernel})
    assert len(part) < 0.55 * len(cubin)


@examples(40)
@given(each_cubin, st.sets(st.sampled_from(sorted(KERNELS))))
def test_a_cut_to_any_kernels_keeps_their_meaning(name: str, keep: set[str]) -> None:
    cubin = CUBINS[name]
    part = cut(cubin, keep)
    assert entry_symbols(part) == keep
    assert meaning(part, keep) == meaning(cubin, keep)


@examples(30)
@given(each_cubin, st.sets(st.sampled_from(sorted(KERNELS))), st.sets(st.sampled_from(sorted(KERNELS))))
def test_cutting_twice_is_cutting_once(name: str, more: set[str], keep: set[str]) -> None:
    cubin = CUBINS[name]
    assert cut(cut(cubin, more | keep), keep) == cut(cubin, keep)


@any_cubin
@pytest.mark.parametrize("keep", [KERNELS, {"scale"}, {"reverse", "indirect"}], ids=len)
def test_symbols_are_split_where_the_linker_split_them(cubin: bytes, keep: set[str]) -> None:
    part = cut(cubin, keep)
    split, bindings = symbol_split(part)
    if symbol_split(cubin)[0] == bindings_before_a_global(symbol_split(cubin)[1]):
        assert split == bindings_before_a_global(bindings)
    else:
        assert split == max(index for index, binding in enumerate(bindings) if binding == LOCAL) + 1


@any_cubin
@pytest.mark.parametrize("keep", [KERNELS, {"scale"}, {"reverse", "indirect"}, set()], ids=len)
def test_program_headers_map_what_is_allocated(cubin: bytes, keep: set[str]) -> None:
    part = cut(cubin, keep)
    rows, segments = sections(part), program_headers(part)
    phoff = struct.unpack_from("<Q", part, 32)[0]
    assert [segment[0] for segment in segments] == [6] + [1] * (len(segments) - 1)
    assert phoff + 56 * len(segments) == len(part)
    for row in rows:
        if row["flags"] & ALLOC and row["type"] != NOBITS and row["size"]:
            around = [s for s in segments if s[2] <= row["offset"] and row["offset"] + row["size"] <= s[2] + s[3]]
            assert len(around) == 1
            assert bool(around[0][1] & 2) == bool(row["flags"] & 1)
            assert around[0][1] & 1 or not row["flags"] & 4
    nobits = [row for row in rows if row["type"] == NOBITS]
    for _, _, offset, filesz, memsz in (segment for segment in segments if segment[1] & 2):
        assert {row["offset"] for row in nobits} <= {offset + filesz}
        assert memsz - filesz == sum(row["size"] for row in nobits)
    assert all(row["offset"] % max(row["align"], 1) == 0 for row in rows)


def test_a_device_function_that_is_called_stays() -> None:
    names = {row["name"] for row in sections(cut(CUBINS[LINKED], {"nested"}))}
    assert {".text.nested", ".text._Z4deepf", ".text._Z5twicef", ".nv.global.init"} <= names
    assert ".text.scale" not in names


@any_cubin
def test_string_tables_hold_what_is_used_and_no_more(cubin: bytes) -> None:
    part = cut(cubin, {"reverse"})
    for word in (b"increase", b"indirect", b".debug_frame"):
        assert word in cubin
        assert word not in part


@any_cubin
def test_an_unknown_kernel_is_named(cubin: bytes) -> None:
    with pytest.raises(CompileError, match="no kernel absent among its 10"):
        cut(cubin, {"scale", "absent"})


@pytest.mark.parametrize(
    ("section", "field", "layout", "value", "message"),
    [
        (".nv.callgraph", 4, "<I", 0x70000003, "type 0x70000003"),
        (".text.scale", 8, "<Q", 0x10000006, "flags 0x10000006"),
        (".text.scale", 44, "<I", 1, "expected the symbol of its function"),
        (".text.scale", 16, "<Q", 4096, "address 0x1000"),
        (".nv.info", 40, "<I", 2, "names symbols of section 2"),
        (".nv.info.scale", 44, "<I", 0xFFFF, "names a section out of"),
    ],
)
def test_what_is_not_understood_is_not_cut(section: str, field: int, layout: str, value: int, message: str) -> None:
    cubin = CUBINS["kernels.sm_90a.cubin"]
    strange = patched(cubin, header_of(cubin, section) + field, layout, value)
    with pytest.raises(UnfamiliarCubinError, match=message):
        cut(strange, {"scale"})
    assert entry_symbols(strange) == KERNELS


@pytest.mark.parametrize(("section", "record"), [(".nv.info", b"\x04\x77"), (".nv.info.scale", b"\x04\x77")])
def test_an_unknown_record_is_not_cut(section: str, record: bytes) -> None:
    cubin = CUBINS["kernels.sm_90a.cubin"]
    row = next(row for row in sections(cubin) if row["name"] == section)
    at = row["offset"] + row["content"].index(b"\x04")
    with pytest.raises(UnfamiliarCubinError, match="record 0x77"):
        cut(cubin[:at] + record + cubin[at + 2 :], {"scale"})


def test_an_unlinked_cubin_is_not_cut() -> None:
    with pytest.raises(UnfamiliarCubinError, match="ELF type 1"):
        cut(patched(CUBINS[LINKED], 16, "<H", 1), {"scale"})


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<B", 0, "expected 7f454c46"),
        (4, "<B", 1, "expected 7f454c46"),
        (18, "<H", 62, "machine 62, expected 190"),
        (40, "<Q", 2**63, "section headers at"),
        (58, "<H", 40, "section headers of 40 bytes"),
        (60, "<H", 0, "section headers at"),
        (60, "<H", 3, "0 symbol tables"),
        (60, "<H", 0xFEFF, "section headers at"),
    ],
)
def test_a_damaged_header_is_told(offset: int, layout: str, value: int, message: str) -> None:
    broken = patched(CUBINS[LINKED], offset, layout, value)
    for read in (entry_symbols, lambda cubin: cut(cubin, {"scale"})):
        with pytest.raises(PlanFormatError, match=message):
            read(broken)


def test_more_sections_than_the_header_can_count_are_listed() -> None:
    cubin = CUBINS[LINKED]
    count = struct.unpack_from("<H", cubin, 60)[0]
    shoff = struct.unpack_from("<Q", cubin, 40)[0]
    extended = patched(patched(cubin, 60, "<H", 0), shoff + 32, "<Q", count)
    assert entry_symbols(extended) == KERNELS
    with pytest.raises(UnfamiliarCubinError, match="extended"):
        cut(extended, {"scale"})


def test_names_that_overlap_cannot_cost_a_square_of_the_size() -> None:
    count = 2000
    strings = b"\0" + b"a" * count + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", 1 + index, 0x12, 0x10, 1, 0, 0) for index in range(count))
    start = 64 + len(strings)
    rows = [(0, 0, 0, 0), (3, 64, len(strings), 0), (2, start, len(symbols), 1)]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 1, 24) for kind, offset, size, link in rows
    )
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 190, 1, 0, 0, start + len(symbols), 0, 64, 56, 0, 64, 3, 1
    )
    with pytest.raises(PlanFormatError, match="overlaps"):
        entry_symbols(header + strings + symbols + headers)


@examples(300)
@given(st.sampled_from([*CUBINS.values(), linked_by_cuda_12_3(cut(CUBINS[OLD], {"scale", "reverse"}))]), st.data())
def test_damage_raises_nothing_but_its_own_errors(cubin: bytes, data: st.DataObject) -> None:
    shoff = struct.unpack_from("<Q", cubin, 40)[0]
    tables = st.integers(0, 63) | st.integers(shoff, len(cubin) - 1) | st.integers(0, len(cubin) - 1)
    broken = bytearray(cubin)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(tables)] = data.draw(st.integers(0, 255))
    file = bytes(broken[: data.draw(st.just(len(cubin)) | st.integers(0, len(cubin)))])
    try:
        names = entry_symbols(file)
    except PlanFormatError:
        names = frozenset()
    try:
        part = cut(file, {"scale"})
    except (CompileError, PlanFormatError):
        return
    assert "scale" in names & entry_symbols(part)


def test_a_cubin_whose_segments_begin_where_others_end_is_cut() -> None:
    cubin = (Path(__file__).parents[1] / "data" / "delay.sm_90.cubin").read_bytes()
    assert meaning(cut(cubin, {"delay"}), {"delay"}) == meaning(cubin, {"delay"})
    assert program_headers(cut(cubin, {"delay"}))
    assert entry_symbols(cut(cubin, set())) == set()


@any_cubin
def test_sections_that_overlap_are_not_cut(cubin: bytes) -> None:
    whole = patched(cubin, header_of(cubin, ".text.scale") + 24, "<QQ", 0, len(cubin))
    with pytest.raises(UnfamiliarCubinError, match=r"bytes of sections that overlap in"):
        cut(whole, {"scale"})


@any_cubin
def test_parameters_are_those_of_the_source(cubin: bytes) -> None:
    pointer, number = Parameter(offset=0, nbytes=8), Parameter(offset=8, nbytes=4)
    assert parameters(cubin, "scale") == (pointer,)
    assert parameters(cubin, "local") == (pointer, number)
    assert parameters(cubin, "say") == (Parameter(offset=0, nbytes=4),)
