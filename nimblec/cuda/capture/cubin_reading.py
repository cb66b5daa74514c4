"""Read the structure of a cubin from untrusted bytes.

A cubin is an ELF64 file of machine 190 (EM_CUDA); a kernel's entry point is a symbol of type FUNC with bit
0x10 (STO_CUDA_ENTRY) in ``st_other``. Every offset is bounded by the file before it is followed, and the work
done is linear in the file's size. Layouts: System V gABI, chapters "ELF Header", "Sections", "Symbol Table".
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from nimblert.errors import PlanFormatError
from nimblert.plan import Parameter

EM_CUDA = 190
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SHT_SYMTAB = 2
SHT_STRTAB = 3
SHT_NOBITS = 8
STT_FUNC = 2
STO_CUDA_ENTRY = 0x10
_EIATTR_KPARAM_INFO = 0x17
_EIFMT_SVAL = 4

_MAGIC = b"\x7fELF\x02\x01\x01"  # ELF64, little endian, version 1


class Header(NamedTuple):
    """ELF header; fields named as in the gABI without their ``e_``. Offsets are byte offsets in the file."""

    ident: bytes
    type: int
    machine: int
    version: int
    entry: int
    phoff: int
    shoff: int
    flags: int
    ehsize: int
    phentsize: int
    phnum: int
    shentsize: int
    shnum: int
    shstrndx: int


class Section(NamedTuple):
    """Section header; fields named as in the gABI without ``sh_``. ``name``: offset into ``.shstrtab``."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    addralign: int
    entsize: int


class Symbol(NamedTuple):
    """Symbol; fields named as in the gABI without their ``st_``. ``name``: offset into the string table."""

    name: int
    info: int
    other: int
    shndx: int
    value: int
    size: int

    @property
    def is_entry(self) -> bool:
        """Whether the symbol is a kernel that can be launched from this cubin."""
        return self.info & 0xF == STT_FUNC and bool(self.other & STO_CUDA_ENTRY) and self.shndx != 0


def entry_symbols(cubin: bytes | memoryview) -> frozenset[str]:
    """Return the mangled names of the kernels in ``cubin``.

    Raises PlanFormatError, with the reason, if the bytes are no cubin or a damaged one.
    """
    file = memoryview(cubin).cast("B")
    sections = read_sections(file)
    table = symbol_table(sections)
    strings = bytes(contents(file, sections[table.link]))
    names = set()
    unread = len(file)  # names that overlap could otherwise cost the square of the file's size
    for offset in {symbol.name for symbol in read_symbols(file, table) if symbol.is_entry}:
        name = read_name(strings, offset)
        unread -= len(name)
        if not name or unread < 0:
            raise PlanFormatError(f"cubin: the kernel's name at {offset} is empty or overlaps others")
        names.add(name)
    return frozenset(names)


def parameters(cubin: bytes | memoryview, symbol: str) -> tuple[Parameter, ...]:
    """Return the parameters of the kernel ``symbol``, as the section that the driver reads describes them.

    Each record of ``.nv.info.SYMBOL`` has a format, an attribute, and two bytes that are its value or the size of what
    follows (cuobjdump --dump-elf shows them by name).
    """
    file = memoryview(cubin).cast("B")
    sections = read_sections(file)
    strings = bytes(contents(file, sections[read_header(file).shstrndx]))
    named = (s for s in sections if read_name(strings, s.name) == f".nv.info.{symbol}")
    records = bytes(contents(file, next(named)))
    found: dict[int, Parameter] = {}
    at = 0
    while at + 4 <= len(records):
        form, attribute, size = struct.unpack_from("<BBH", records, at)
        at += 4
        if form == _EIFMT_SVAL:
            if attribute == _EIATTR_KPARAM_INFO:
                _, ordinal, offset, flags = struct.unpack_from("<IHHI", records, at)
                found[ordinal] = Parameter(offset=offset, nbytes=flags >> 18)
            at += size
    return tuple(found[ordinal] for ordinal in sorted(found))


def read_header(file: memoryview) -> Header:
    """Return the ELF header of a cubin."""
    if len(file) < HEADER.size:
        raise PlanFormatError(f"cubin: {len(file)} bytes, expected an ELF header of {HEADER.size}")
    header = Header(*HEADER.unpack_from(file))
    if not header.ident.startswith(_MAGIC):
        raise PlanFormatError(f"cubin: starts with {header.ident[:7].hex()}, expected {_MAGIC.hex()} (ELF64)")
    if header.machine != EM_CUDA:
        raise PlanFormatError(f"cubin: ELF machine {header.machine}, expected {EM_CUDA} (CUDA)")
    if header.shentsize != SECTION.size:
        raise PlanFormatError(f"cubin: section headers of {header.shentsize} bytes, expected {SECTION.size}")
    return header


def read_sections(file: memoryview) -> tuple[Section, ...]:
    """Return the section headers of a cubin; only their number is checked against the file."""
    header = read_header(file)
    count = header.shnum or _extended_count(file, header)
    end = header.shoff + count * SECTION.size
    if count == 0 or end > len(file):
        raise PlanFormatError(f"cubin: {count} section headers at {header.shoff} of {len(file)} bytes")
    return tuple(map(Section._make, SECTION.iter_unpack(file[header.shoff : end])))


def _extended_count(file: memoryview, header: Header) -> int:
    """Return the number of sections if it does not fit the header (gABI: ``sh_size`` of section 0)."""
    if header.shoff + SECTION.size > len(file):
        raise PlanFormatError(f"cubin: section headers at {header.shoff} of {len(file)} bytes")
    return Section(*SECTION.unpack_from(file, header.shoff)).size


def symbol_table(sections: tuple[Section, ...]) -> Section:
    """Return the only symbol table among ``sections``; its string table is checked to be one."""
    tables = [section for section in sections if section.type == SHT_SYMTAB]
    if len(tables) != 1:
        raise PlanFormatError(f"cubin: {len(tables)} symbol tables, expected 1")
    table = tables[0]
    if table.entsize != SYMBOL.size or table.size % SYMBOL.size:
        raise PlanFormatError(f"cubin: {table.size} bytes of symbols, expected entries of {SYMBOL.size}")
    if table.link >= len(sections) or sections[table.link].type != SHT_STRTAB:
        raise PlanFormatError(f"cubin: section {table.link}, for the symbols' names, is no string table")
    return table


def read_symbols(file: memoryview, table: Section) -> Iterator[Symbol]:
    """Yield the entries of the table that ``symbol_table`` returned."""
    return map(Symbol._make, SYMBOL.iter_unpack(contents(file, table)))


def contents(file: memoryview, section: Section) -> memoryview:
    """Return a section's bytes: none for NOBITS."""
    nbytes = 0 if section.type == SHT_NOBITS else section.size
    if section.offset + nbytes > len(file):
        raise PlanFormatError(f"cubin: section ends at {section.offset + nbytes}, the file at {len(file)}")
    return file[section.offset : section.offset + nbytes]


def read_name(strings: bytes, offset: int) -> str:
    """Return the NUL-terminated string at ``offset`` of a string table."""
    end = strings.find(b"\0", offset)
    if end < 0:
        raise PlanFormatError(f"cubin: name at {offset} does not end in its string table")
    try:
        return strings[offset:end].decode()
    except UnicodeDecodeError as exc:
        raise PlanFormatError(f"cubin: name at {offset} is not UTF-8: {exc.reason}") from exc
