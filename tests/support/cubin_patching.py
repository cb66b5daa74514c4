"""Cubins with single fields changed."""

import struct

from cubin_meaning import EXEC, sections

RELOCATIONS = {4, 9}
HOLDERS = {*RELOCATIONS, 0x70000000, 0x70000001}
"""Types of the sections with symbol indices."""


def patched(cubin: bytes, offset: int, layout: str, *values: int) -> bytes:
    return cubin[:offset] + struct.pack(layout, *values) + cubin[offset + struct.calcsize(layout) :]


def header_of(cubin: bytes, name: str) -> int:
    """Return the offset of a section's header."""
    index = [row["name"] for row in sections(cubin)].index(name)
    start: int = struct.unpack_from("<Q", cubin, 40)[0]
    return start + 64 * index


def without_relocations(cubin: bytes) -> bytes:
    """Return ``cubin`` with no relocations but those of debug sections."""
    for row in sections(cubin):
        if row["type"] in RELOCATIONS and "debug" not in row["name"]:
            cubin = patched(cubin, header_of(cubin, row["name"]) + 32, "<Q", 0)
    return cubin


def linked_by_cuda_12_3(cubin: bytes) -> bytes:
    """Return ``cubin`` with no relocations, and ``.nv.info`` named where the symbol table belongs."""
    rows = sections(cubin)
    link = [row["name"] for row in rows].index(".nv.info")
    for row in rows:
        if row["type"] in HOLDERS or row["flags"] & EXEC:
            cubin = patched(cubin, header_of(cubin, row["name"]) + 40, "<I", link)
    return without_relocations(cubin)
