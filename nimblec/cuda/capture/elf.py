"""Take an ELF64 cubin apart into records without offsets, and write such records as a file.

``write`` recomputes file offsets, string tables and program headers. The layout is that of ptxas and
nvlink: header, sections in order, section headers, program headers. Source: System V gABI, and the section tables
of cubins of CUDA 12.8 to 13.x (ABI versions 7 and 8).
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nimblec.base.errors import CompileError
from nimblec.cuda.capture.cubin_reading import (
    HEADER,
    SECTION,
    SHT_NOBITS,
    SHT_STRTAB,
    SHT_SYMTAB,
    SYMBOL,
    Header,
    Section,
    Symbol,
    contents,
    read_header,
    read_name,
    read_sections,
    read_symbols,
    symbol_table,
)

SHF_WRITE = 0x1
SHF_ALLOC = 0x2
SHF_EXECINSTR = 0x4
SHF_INFO_LINK = 0x40
PT_LOAD = 1
PT_PHDR = 6
PF_W = 0x2
SHT_CUDA_PROTOTYPE = 0x70000002

_PROTOTYPE = struct.Struct("<II")  # symbol, offset of the text in the symbols' string table

_SEGMENT = struct.Struct("<IIQQQQQQ")
_TABLE_ALIGN = 8
_MAX_ALIGN = 4096
_MAX_NBYTES = 1 << 32


class UnfamiliarCubinError(CompileError):
    """A cubin with a construct whose meaning is unknown: use it as it was captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSection:
    """A section with its name and bytes; ``header.name`` and ``header.offset`` are those in the original file."""

    name: str
    header: Section
    content: bytes

    @property
    def owner(self) -> int | None:
        """The section that this one belongs to; older compilers leave the flag SHF_INFO_LINK off."""
        names_symbol = self.header.flags & SHF_EXECINSTR or self.header.type == SHT_SYMTAB
        return None if names_symbol else self.header.info or None

    @property
    def is_debug(self) -> bool:
        """Whether only debuggers read the section."""
        return self.name.startswith((".debug_", ".nv_debug_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSymbol:
    """A symbol with its name; ``symbol.name`` is that in the original file."""

    name: str
    symbol: Symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class Prototype:
    """The encoded parameters of a function, for the linker."""

    symbol: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A program header: the indices of the sections it maps, or none where it maps the program headers."""

    type: int
    flags: int
    align: int
    sections: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elf:
    """A cubin. ``sections[0]`` and ``symbols[0]`` are the null entries; ``symtab`` is the index of a section."""

    header: Header
    sections: tuple[NamedSection, ...]
    symbols: tuple[NamedSymbol, ...]
    prototypes: tuple[Prototype, ...]
    segments: tuple[Segment, ...]
    symtab: int

    @property
    def strtab(self) -> int:
        """Index of the section with the symbols' names."""
        return self.sections[self.symtab].header.link


def parse(cubin: bytes | memoryview) -> Elf:
    """Return the parts of a cubin.

    Raises PlanFormatError if the bytes are no cubin, UnfamiliarCubinError if ``write`` could not restore its structure.
    """
    file = memoryview(cubin).cast("B")
    header = read_header(file)
    headers = read_sections(file)
    table = symbol_table(headers)
    if header.shnum == 0 or header.ehsize != HEADER.size or not 0 < header.shstrndx < len(headers):
        raise UnfamiliarCubinError("cubin: extended ELF numbering or an ELF header of another size")
    if headers[header.shstrndx].type != SHT_STRTAB or header.shstrndx == table.link:
        raise UnfamiliarCubinError("cubin: sections and symbols share a string table")
    prototypes = [section.size for section in headers if section.type == SHT_CUDA_PROTOTYPE]
    if len(prototypes) > 1 or sum(prototypes) % _PROTOTYPE.size:
        raise UnfamiliarCubinError(f"cubin: sections of prototypes with {prototypes} bytes")
    nbytes = sum(section.size for section in headers if section.type != SHT_NOBITS)
    if nbytes > len(file):
        raise UnfamiliarCubinError(f"cubin: {nbytes} bytes of sections that overlap in {len(file)}")
    if any(section.addralign > _MAX_ALIGN or section.size > _MAX_NBYTES for section in headers):
        raise UnfamiliarCubinError("cubin: an alignment above a page, or a section above 4 GiB")
    section_names = bytes(contents(file, headers[header.shstrndx]))
    symbol_names = bytes(contents(file, headers[table.link]))
    return Elf(
        header=header,
        sections=tuple(
            NamedSection(
                name=read_name(section_names, section.name),
                header=section,
                content=bytes(contents(file, section)),
            )
            for section in headers
        ),
        symbols=tuple(
            NamedSymbol(name=read_name(symbol_names, symbol.name), symbol=symbol)
            for symbol in read_symbols(file, table)
        ),
        prototypes=tuple(
            Prototype(symbol=symbol, text=read_name(symbol_names, offset))
            for section in headers
            if section.type == SHT_CUDA_PROTOTYPE
            for symbol, offset in _PROTOTYPE.iter_unpack(contents(file, section))
        ),
        segments=_read_segments(file, header, headers),
        symtab=headers.index(table),
    )


def _read_segments(file: memoryview, header: Header, headers: Sequence[Section]) -> tuple[Segment, ...]:
    """Return the program headers with the sections that each maps; every allocated section is in one."""
    end = header.phoff + header.phnum * _SEGMENT.size
    if end > len(file) or (header.phnum and header.phentsize != _SEGMENT.size):
        raise UnfamiliarCubinError(f"cubin: {header.phnum} program headers of {header.phentsize} bytes")
    raw = list(_SEGMENT.iter_unpack(file[header.phoff : end]))
    members: list[list[int]] = [[] for _ in raw]
    for index, section in enumerate(headers):
        if section.flags & SHF_ALLOC:
            members[_segment_of(section, raw, header.phoff)].append(index)
    segments = []
    for (kind, flags, offset, vaddr, _, _, _, align), sections in zip(raw, members, strict=True):
        if kind not in {PT_LOAD, PT_PHDR} or vaddr:
            raise UnfamiliarCubinError(f"cubin: program header of type {kind:#x} at address {vaddr:#x}")
        if not sections and offset != header.phoff:
            raise UnfamiliarCubinError(f"cubin: program header over {offset:#x}, where no section is")
        segments.append(Segment(type=kind, flags=flags, align=align, sections=tuple(sections)))
    return tuple(segments)


def _segment_of(section: Section, segments: Sequence[tuple[int, ...]], phoff: int) -> int:
    """Return the index of the segment that maps ``section``: it contains the section, and is as writable.

    Sections without bytes in the file are at the end of their segment.
    """
    nbytes = 0 if section.type == SHT_NOBITS else section.size
    for index, (kind, flags, offset, _, _, filesz, _, _) in enumerate(segments):
        inside = offset <= section.offset and section.offset + nbytes <= offset + filesz
        same = bool(flags & PF_W) == bool(section.flags & SHF_WRITE)
        if kind == PT_LOAD and offset != phoff and inside and same:
            return index
    raise UnfamiliarCubinError(f"cubin: section at {section.offset:#x} is allocated by no program header")


def write(elf: Elf) -> bytes:
    """Return ``elf`` as a file. Equal records give equal bytes."""
    section_names, section_name_at = _string_table(section.name for section in elf.sections)
    symbol_names, symbol_name_at = _string_table(
        [symbol.name for symbol in elf.symbols] + [prototype.text for prototype in elf.prototypes]
    )
    generated = {
        elf.header.shstrndx: section_names,
        elf.strtab: symbol_names,
        elf.symtab: b"".join(
            SYMBOL.pack(*entry.symbol._replace(name=symbol_name_at[entry.name])) for entry in elf.symbols
        ),
    } | {
        index: b"".join(_PROTOTYPE.pack(p.symbol, symbol_name_at[p.text]) for p in elf.prototypes)
        for index, section in enumerate(elf.sections)
        if section.header.type == SHT_CUDA_PROTOTYPE
    }
    file = bytearray(HEADER.size)
    headers = []
    nobits_align = max((s.header.addralign for s in elf.sections if s.header.type == SHT_NOBITS), default=1)
    for index, section in enumerate(elf.sections):
        content = generated.get(index, section.content)
        nobits = section.header.type == SHT_NOBITS
        _pad(file, nobits_align if nobits else section.header.addralign)
        place = section.header._replace(
            name=section_name_at[section.name],
            offset=len(file) if index else 0,
            size=section.header.size if nobits else len(content),
        )
        headers.append(place)
        file += content
    _pad(file, _TABLE_ALIGN)
    shoff = len(file)
    file += b"".join(SECTION.pack(*header) for header in headers)
    phoff = len(file)
    file += b"".join(_segment_bytes(elf.segments, headers, phoff))
    header = elf.header._replace(
        shoff=shoff, shnum=len(headers), phoff=phoff if elf.segments else 0, phnum=len(elf.segments)
    )
    file[: HEADER.size] = HEADER.pack(*header)
    return bytes(file)


def _segment_bytes(segments: Sequence[Segment], headers: Sequence[Section], phoff: int) -> list[bytes]:
    """Return the program headers; NOBITS sections add to a segment's memory, not to its bytes in the file."""
    packed = []
    for segment in segments:
        mapped = [headers[index] for index in segment.sections]
        nobits = [section for section in mapped if section.type == SHT_NOBITS]
        start, end = phoff, phoff + len(segments) * _SEGMENT.size
        if mapped:
            start = min(section.offset for section in mapped)
            end = max(s.offset + (0 if s.type == SHT_NOBITS else s.size) for s in mapped)
        memory = end - start + sum(section.size for section in nobits)
        packed.append(_SEGMENT.pack(segment.type, segment.flags, start, 0, 0, end - start, memory, segment.align))
    return packed


def _string_table(names: Iterable[str]) -> tuple[bytes, dict[str, int]]:
    """Return a string table of ``names`` in order, each once, and the offset of each."""
    table = bytearray(b"\0")
    offsets = {"": 0}
    for name in names:
        if name not in offsets:
            offsets[name] = len(table)
            table += name.encode() + b"\0"
    return bytes(table), offsets


def _pad(file: bytearray, align: int) -> None:
    file += bytes(-len(file) % max(align, 1))
