"""Cubins that name ``.nv.info`` as their symbol table, as the linker of CUDA 12.3 wrote them."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from cubin_meaning import EXEC, meaning, sections
from cubin_patching import HOLDERS, header_of, linked_by_cuda_12_3, patched, without_relocations

from nimblec.cuda.capture.cubin_cut import cut
from nimblec.cuda.capture.cubin_reading import entry_symbols
from nimblec.cuda.capture.elf import UnfamiliarCubinError

DATA = Path(__file__).parents[1] / "data"
KEPT = {"scale", "reverse", "nested", "_Z8increaseIfEvPT_"}
GOOD = {
    name: without_relocations(cut((DATA / f"kernels.{name}.cubin").read_bytes(), KEPT))
    for name in ("sm_80", "sm_90.cuda12", "sm_90a")
}
DELAY = (DATA / "delay.sm_90.cubin").read_bytes()
MISLINKED = linked_by_cuda_12_3(GOOD["sm_90.cuda12"])
FRAME_SIZE, REGCOUNT, PARAM_CBANK = 0x11, 0x2F, 0x0A


def record(cubin: bytes, section: str, attribute: int) -> int:
    """Return the offset of the first symbol in the first record ``attribute``."""
    row = next(row for row in sections(cubin) if row["name"] == section)
    at = row["offset"]
    while (found := struct.unpack_from("<BBH", cubin, at))[1] != attribute:
        at += 4 + (found[2] if found[0] == 4 else 0)
    return at + 4


def constants_of_another(cubin: bytes) -> bytes:
    (other,) = struct.unpack_from("<I", cubin, record(cubin, ".nv.info.reverse", PARAM_CBANK))
    return patched(cubin, record(cubin, ".nv.info.scale", PARAM_CBANK), "<I", other)


@pytest.mark.parametrize("keep", [KEPT, {"scale"}, {"reverse", "nested"}, set()], ids=len)
@pytest.mark.parametrize("name", GOOD)
def test_it_is_cut_like_one_that_names_its_symbol_table(name: str, keep: set[str]) -> None:
    good, mislinked = GOOD[name], linked_by_cuda_12_3(GOOD[name])
    assert mislinked != good
    part = cut(mislinked, keep)
    assert part == cut(good, keep)
    assert entry_symbols(part) == keep
    assert meaning(part, keep) == meaning(good, keep)


@pytest.mark.parametrize("name", GOOD)
def test_a_cut_names_its_symbol_table(name: str) -> None:
    rows = sections(cut(linked_by_cuda_12_3(GOOD[name]), {"scale"}))
    named = {rows[row["link"]]["name"] for row in rows if row["type"] in HOLDERS or row["flags"] & EXEC}
    assert named == {".symtab"}


def test_relocations_of_debug_sections_are_dropped_with_them() -> None:
    mislinked = linked_by_cuda_12_3(DELAY)
    assert next(row for row in sections(mislinked) if row["name"] == ".rela.debug_frame")["size"]
    assert cut(mislinked, {"delay"}) == cut(DELAY, {"delay"})


DOUBTFUL: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another link": (
        lambda cubin: patched(cubin, header_of(cubin, ".text.scale") + 40, "<I", 2),
        r"\.text\.scale names section 2;",
    ),
    "no register count": (
        lambda cubin: patched(cubin, record(cubin, ".nv.info", REGCOUNT) - 3, "<B", FRAME_SIZE + 1),
        "its records 0x2f are not one for each of the 4 functions",
    ),
    "constants of another kernel": (constants_of_another, r"\.nv\.info\.scale names symbol \d+, expected that of"),
    "no such symbol": (
        lambda cubin: patched(cubin, record(cubin, ".nv.info.scale", PARAM_CBANK), "<I", 1 << 16),
        r"\.nv\.info\.scale names symbol 65536, expected that of \.nv\.constant0",
    ),
}
"""What is done to MISLINKED, and the reason to leave it whole."""


@pytest.mark.parametrize("case", DOUBTFUL)
def test_what_does_not_fit_the_symbol_table_is_not_cut(case: str) -> None:
    damage, reason = DOUBTFUL[case]
    with pytest.raises(UnfamiliarCubinError, match=f"names itself as symbol table, and .*{reason}"):
        cut(damage(MISLINKED), {"scale"})


def test_a_relocation_is_not_trusted() -> None:
    size = header_of(MISLINKED, ".rela.nv.constant4") + 32
    with pytest.raises(UnfamiliarCubinError, match=r"\.rela\.nv\.constant4 names symbol \d+, which cannot be checked"):
        cut(patched(MISLINKED, size, "<Q", 24), {"scale"})


@pytest.mark.parametrize(("section", "owner"), [(".debug_frame", ".text.delay"), (".rela.debug_frame", None)])
def test_relocations_of_what_is_not_just_debug_are_not_trusted(section: str, owner: str | None) -> None:
    index = 0xFFFF if owner is None else [row["name"] for row in sections(DELAY)].index(owner)
    mislinked = linked_by_cuda_12_3(patched(DELAY, header_of(DELAY, section) + 44, "<I", index))
    with pytest.raises(UnfamiliarCubinError, match=r"\.rela\.debug_frame names symbol"):
        cut(mislinked, {"delay"})
