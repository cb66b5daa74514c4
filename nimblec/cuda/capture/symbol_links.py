"""Mend cubins whose sections name ``.nv.info`` where they should name their symbol table.

The linker of CUDA 12.3 wrote such cubins; cuBLAS 13 holds 187, with CUTLASS kernels for sm_75 to sm_90. Wherever
``sh_link`` should be the index of ``.symtab``, it is that of ``.nv.info``. A cubin has only one symbol table, so the
driver can only take their symbol indices from that one; ``with_symbol_links`` checks that they fit it.
"""

from collections.abc import Iterator
from dataclasses import replace

from nimblec.cuda.capture import symbol_references
from nimblec.cuda.capture.cubin_reading import STT_FUNC, Symbol
from nimblec.cuda.capture.elf import SHF_EXECINSTR, Elf, NamedSection, UnfamiliarCubinError

_STT_SECTION = 3
_BANK = ".nv.constant0."


def with_symbol_links(elf: Elf) -> Elf:
    """Return ``elf`` with each such ``sh_link`` naming ``.symtab``, or unchanged if ``.nv.info`` does not name itself.

    Raises UnfamiliarCubinError if a symbol index cannot be shown to be one of ``.symtab``.
    """
    for link, section in enumerate(elf.sections):
        if symbol_references.is_description(section) and section.header.link == link:
            return _mended(elf, link)
    return elf


def _mended(elf: Elf, link: int) -> Elf:
    for reason in _doubts(elf, link):
        raise UnfamiliarCubinError(f"cubin: .nv.info names itself as symbol table, and {reason}; keep it as captured")
    return replace(
        elf,
        sections=tuple(
            replace(section, header=section.header._replace(link=elf.symtab)) if _has_symbols(section) else section
            for section in elf.sections
        ),
    )


def _has_symbols(section: NamedSection) -> bool:
    return section.header.type in symbol_references.HOLDERS or bool(section.header.flags & SHF_EXECINSTR)


def _doubts(elf: Elf, link: int) -> Iterator[str]:
    """Yield a reason for each section whose symbol indices may not be those of ``.symtab``.

    ``link`` is the section that they all name for it. ``cut`` checks the index in the header of code by itself.
    """
    banks = {section.owner: index for index, section in enumerate(elf.sections) if section.name.startswith(_BANK)}
    for section in filter(_has_symbols, elf.sections):
        if section.header.link != link:
            yield f"{section.name} names section {section.header.link}"
        elif symbol_references.is_description(section):
            yield from _misdescribed(elf, section)
        elif section.header.type == symbol_references.SHT_CUDA_INFO:
            yield from _not_of_bank(elf, section, banks.get(section.owner))
        elif section.header.type in symbol_references.HOLDERS and not _is_of_debug(elf, section):
            for symbol in symbol_references.named_symbols(section):
                yield f"{section.name} names symbol {symbol}, which cannot be checked"


def _is_of_debug(elf: Elf, section: NamedSection) -> bool:
    """Return whether ``section`` belongs to a debug section, and so is dropped with it."""
    owner = section.owner
    if owner is None or owner >= len(elf.sections):
        return False
    return elf.sections[owner].is_debug and elf.sections[owner].owner is None


def _misdescribed(elf: Elf, info: NamedSection) -> Iterator[str]:
    """Yield a reason unless ``.nv.info`` has one frame size per function, and one register count per code section."""
    functions = {index for index, entry in enumerate(elf.symbols) if _lies_in_code(elf, entry.symbol)}
    of_code = {s.header.info & 0xFFFFFF for s in elf.sections if s.header.flags & SHF_EXECINSTR}
    for attribute, expected in ((symbol_references.FRAME_SIZE, functions), (symbol_references.REGCOUNT, of_code)):
        if sorted(symbol_references.described_symbols(info, attribute)) != sorted(expected):
            yield f"its records {attribute:#x} are not one for each of the {len(expected)} functions"


def _lies_in_code(elf: Elf, symbol: Symbol) -> bool:
    if symbol.info & 0xF != STT_FUNC or symbol.shndx >= len(elf.sections):
        return False
    code = elf.sections[symbol.shndx].header
    return bool(code.flags & SHF_EXECINSTR) and symbol.value + symbol.size <= code.size


def _not_of_bank(elf: Elf, info: NamedSection, bank: int | None) -> Iterator[str]:
    """Yield a reason for each symbol in ``.nv.info.X`` but that of ``.nv.constant0.X``, section ``bank``."""
    for symbol in symbol_references.named_symbols(info):
        entry = elf.symbols[symbol].symbol if symbol < len(elf.symbols) else None
        if entry is None or (entry.info & 0xF, entry.shndx) != (_STT_SECTION, bank):
            yield f"{info.name} names symbol {symbol}, expected that of {_BANK[:-1]}"
