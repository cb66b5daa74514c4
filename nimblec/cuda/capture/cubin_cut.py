"""Cut a cubin down to the kernels that a plan launches.

Libraries ship modules of hundreds of kernels. ``cut`` drops the entry points that are not needed with all that belongs
to them alone, and debug sections, and renumbers all references to sections and symbols. It raises
``UnfamiliarCubinError`` for anything it has no rule for: the caller then keeps the cubin as captured.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from nimblec.base.errors import CompileError
from nimblec.cuda.capture import symbol_references
from nimblec.cuda.capture.cubin_reading import SHT_NOBITS, SHT_STRTAB, SHT_SYMTAB, STT_FUNC
from nimblec.cuda.capture.elf import (
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHF_INFO_LINK,
    SHF_WRITE,
    SHT_CUDA_PROTOTYPE,
    Elf,
    NamedSection,
    NamedSymbol,
    UnfamiliarCubinError,
    parse,
    write,
)
from nimblec.cuda.capture.symbol_links import with_symbol_links

_ET_EXEC = 2
_SHN_ABS = 0xFFF1
_SHT_NOTE = 7
_KNOWN_TYPES = {
    0,  # null
    1,  # PROGBITS
    SHT_SYMTAB,
    SHT_STRTAB,
    SHT_NOBITS,
    _SHT_NOTE,
    0x7000000B,  # .nv.rel.action: by type of relocation
    0x70000086,  # .nv.compat: of the whole file
    SHT_CUDA_PROTOTYPE,
    *symbol_references.HOLDERS,
}
_KNOWN_FLAGS = SHF_WRITE | SHF_ALLOC | SHF_EXECINSTR | SHF_INFO_LINK
_TEXT_FLAGS = 0x07F00000  # number of barriers, up to CUDA 12
_NOTE_FLAGS = 0x03000000


def cut(cubin: bytes | memoryview, keep: Collection[str]) -> bytes:
    """Return a cubin with the entry points ``keep``, their dependencies, and as little else as is safe.

    Device functions, global variables and the constant banks that all kernels share stay: linked instructions use
    them without a trace outside the code. Equal arguments give equal bytes, whatever the order of ``keep``.

    Raises CompileError if a name of ``keep`` is no kernel of ``cubin``, PlanFormatError if ``cubin`` is no cubin, and
    UnfamiliarCubinError if it must be used as it is.
    """
    elf = with_symbol_links(parse(cubin))
    for reason in _unfamiliar(elf):
        raise UnfamiliarCubinError(f"cubin: {reason}; keep it as captured")
    kernels = {entry.name: entry.symbol.shndx for entry in elf.symbols if entry.symbol.is_entry}
    missing = sorted(set(keep) - kernels.keys())
    if missing:
        raise CompileError(f"cubin: no kernel {missing[0]} among its {len(kernels)}, needed to cut it")
    roots = [_root(elf, index) for index in range(len(elf.sections))]
    code = frozenset(kernels.values())
    dropped = code - _reached(elf, roots, code, {kernels[name] for name in keep})
    return write(
        _select(
            elf,
            [index for index, root in enumerate(roots) if root not in dropped and not elf.sections[root].is_debug],
        )
    )


def _unfamiliar(elf: Elf) -> Iterator[str]:
    """Yield a reason for each part of a cubin that ``cut`` has no rule for."""
    if elf.header.type != _ET_EXEC:
        yield f"ELF type {elf.header.type}, expected {_ET_EXEC} (linked)"
    for index, entry in enumerate(elf.symbols):
        if len(elf.sections) <= entry.symbol.shndx != _SHN_ABS:
            yield f"symbol {index} ({entry.name}): in section {entry.symbol.shndx:#x}"
    for index, section in enumerate(elf.sections):
        for reason in _unfamiliar_header(elf, index):
            yield f"section {index} ({section.name}): {reason}"
        if section.header.type in symbol_references.HOLDERS:
            for reason in _unfamiliar_references(elf, section):
                yield f"{section.name}: {reason}"


def _unfamiliar_references(elf: Elf, section: NamedSection) -> Iterator[str]:
    """Yield a reason for each symbol of ``section`` that cannot be what it is taken for."""
    for symbol in symbol_references.named_symbols(section):
        if symbol >= len(elf.symbols):
            yield f"names symbol {symbol} of {len(elf.symbols)}"
        elif symbol_references.is_description(section) and not _is_function(elf.symbols[symbol]):
            yield f"describes symbol {symbol}, which is no function"


def _unfamiliar_header(elf: Elf, index: int) -> Iterator[str]:
    """Yield the unknown parts of the header of section ``index``."""
    header = elf.sections[index].header
    is_text = bool(header.flags & SHF_EXECINSTR)
    allowed = _TEXT_FLAGS if is_text else _NOTE_FLAGS if header.type == _SHT_NOTE else 0
    owner = elf.sections[index].owner
    if header.type not in _KNOWN_TYPES:
        yield f"type {header.type:#x}"
    if header.flags & ~(_KNOWN_FLAGS | allowed) or header.addr:
        yield f"flags {header.flags:#x}, address {header.addr:#x}"
    if max(header.link, owner or 0) >= len(elf.sections):
        yield f"names a section out of {len(elf.sections)}"
    elif header.type in {SHT_CUDA_PROTOTYPE, *symbol_references.HOLDERS} and header.link != elf.symtab:
        yield f"names symbols of section {header.link}, expected {elf.symtab}"
    if is_text and not _names_its_function(elf, index):
        yield f"sh_info {header.info:#x}, expected the symbol of its function"


def _names_its_function(elf: Elf, index: int) -> bool:
    """Return whether the low 24 bits of ``sh_info`` of a code section are its function's symbol (above: registers)."""
    symbol = elf.sections[index].header.info & 0xFFFFFF
    return symbol < len(elf.symbols) and elf.symbols[symbol].symbol.shndx == index and _is_function(elf.symbols[symbol])


def _is_function(entry: NamedSymbol) -> bool:
    return entry.symbol.info & 0xF == STT_FUNC


def _root(elf: Elf, index: int) -> int:
    """Return the owner of section ``index``, such as ``.text.X`` for ``.rela.nv.constant2.X``, or itself if none."""
    for _ in elf.sections:
        owner = elf.sections[index].owner
        if owner is None:
            return index
        index = owner
    raise UnfamiliarCubinError(f"cubin: section {index} belongs to itself; keep it as captured")


def _reached(elf: Elf, roots: list[int], code: frozenset[int], wanted: set[int]) -> set[int]:
    """Return ``wanted`` (code of kernels), all that belongs to no kernel, and the sections that these refer to.

    ``code`` is the code of all kernels; ``roots[i]`` is the section that owns section i.
    """
    uses: dict[int, set[int]] = defaultdict(set)
    for section, root in zip(elf.sections, roots, strict=True):
        if section.header.type not in symbol_references.HOLDERS or elf.sections[root].is_debug:
            continue
        for user, used in symbol_references.references(section):
            source = root if user is None else elf.symbols[user].symbol.shndx
            target = elf.symbols[used].symbol.shndx
            if target != _SHN_ABS:
                uses[source].add(roots[target])
    reached: set[int] = set()
    todo = [*wanted, *(source for source in uses if source not in code)]
    while todo:
        root = todo.pop()
        if root not in reached:
            reached.add(root)
            todo += uses[root]
    return reached


def _select(elf: Elf, sections: list[int]) -> Elf:
    """Return ``elf`` with only ``sections`` and the symbols in them or in no section, both renumbered."""
    section_at = {old: new for new, old in enumerate(sections)} | {_SHN_ABS: _SHN_ABS}
    if not {elf.header.shstrndx, elf.symtab, elf.strtab} <= section_at.keys():
        raise UnfamiliarCubinError("cubin: names or symbols belong to a section that is dropped; keep it as captured")
    symbols = [index for index, entry in enumerate(elf.symbols) if entry.symbol.shndx in section_at]
    symbol_at = {old: new for new, old in enumerate(symbols)}
    entries = tuple(
        replace(entry, symbol=entry.symbol._replace(shndx=section_at[entry.symbol.shndx]))
        for entry in (elf.symbols[index] for index in symbols)
    )
    segments = (
        replace(segment, sections=tuple(section_at[old] for old in segment.sections if old in section_at))
        for segment in elf.segments
        if not segment.sections or not section_at.keys().isdisjoint(segment.sections)
    )
    return Elf(
        header=elf.header._replace(shstrndx=section_at[elf.header.shstrndx]),
        sections=tuple(_moved(elf.sections[old], section_at, symbol_at) for old in sections),
        symbols=entries,
        prototypes=tuple(
            replace(prototype, symbol=symbol_at[prototype.symbol])
            for prototype in elf.prototypes
            if prototype.symbol in symbol_at
        ),
        segments=tuple(segments),
        symtab=section_at[elf.symtab],
    )


def _moved(section: NamedSection, section_at: dict[int, int], symbol_at: dict[int, int]) -> NamedSection:
    """Return ``section`` with the new numbers of sections and symbols in its header and its bytes."""
    header, content = section.header, section.content
    if header.link not in section_at:
        raise UnfamiliarCubinError(f"cubin: {section.name} refers to a section that is dropped")
    if header.type in symbol_references.HOLDERS:
        content = symbol_references.renumber(section, symbol_at.get)
    info = header.info
    if section.owner is not None:
        info = section_at[section.owner]
    elif header.flags & SHF_EXECINSTR:
        info = info & ~0xFFFFFF | symbol_at[info & 0xFFFFFF]
    elif header.type == SHT_SYMTAB:
        # The info of a symbol table is the index of its first global symbol.
        info = sum(old < info for old in symbol_at)
    header = header._replace(link=section_at[header.link], info=info)
    return replace(section, header=header, content=content)
