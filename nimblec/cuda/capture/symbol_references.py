"""The symbol indices in the sections of a cubin, and how to renumber them.

These sections have no public documentation; their meaning was derived from cubins of CUDA 12.8 to 13.x for sm_80 and
sm_90 with ``cuobjdump -elf``, which names most records.
"""

import struct
from collections.abc import Callable, Iterator

from nimblec.cuda.capture.elf import NamedSection, UnfamiliarCubinError

SHT_RELA = 4
SHT_REL = 9
SHT_CUDA_INFO = 0x70000000
SHT_CUDA_CALLGRAPH = 0x70000001
RELOCATIONS = {SHT_REL: struct.Struct("<QQ"), SHT_RELA: struct.Struct("<QQq")}
HOLDERS = {SHT_CUDA_INFO, SHT_CUDA_CALLGRAPH, *RELOCATIONS}
"""Types of the sections that ``references`` and ``renumber`` read; ``sh_link`` of each is the symbol table."""

Renumber = Callable[[int], int | None]
"""New index of a symbol, None if it is dropped."""

_CALL = struct.Struct("<Ii")  # caller and callee; 0 with a small negative number heads a list, here always empty
_RECORD = struct.Struct("<BBH")  # format, attribute, value
_WORD = struct.Struct("<I")
_FORMAT_SIZED = 4  # EIFMT_SVAL: the value counts the bytes that follow

FRAME_SIZE = 0x11
REGCOUNT = 0x2F
# Records of .nv.info: a function's symbol, then a value.
_FUNCTION_RECORDS = {
    FRAME_SIZE,
    0x12,  # MIN_STACK_SIZE
    0x1B,
    0x23,  # MAX_STACK_SIZE
    REGCOUNT,
    0x52,
    0x54,
    0x55,
}
# Records of .nv.info.X: the positions of symbols among the words.
_KERNEL_RECORDS = {
    0x05: slice(0),  # MAX_THREADS
    0x0A: slice(1),  # PARAM_CBANK: of .nv.constant0.X, then offset and size of the parameters in it
    0x0F: slice(None),  # EXTERNS
    0x10: slice(0),  # REQNTID
    0x17: slice(0),  # KPARAM_INFO
    0x1C: slice(0),  # EXIT_INSTR_OFFSETS
    0x1D: slice(0),  # S2RCTAID_INSTR_OFFSETS
    0x1E: slice(0),  # CRS_STACK_SIZE
    0x25: slice(0),  # LD_CACHEMOD_INSTR_OFFSETS
    0x26: slice(0),  # LOAD_CACHE_REQUEST
    0x27: slice(0),  # ATOM_SYS_INSTR_OFFSETS
    0x28: slice(0),  # COOP_GROUP_INSTR_OFFSETS
    0x29: slice(0),  # COOP_GROUP_MASK_REGIDS
    0x2D: slice(0),  # ATOMF16_EMUL_INSTR_OFFSETS
    0x2E: slice(0),  # ATOM16_EMUL_INSTR_REG_MAP
    0x31: slice(0),  # INT_WARP_WIDE_INSTR_OFFSETS
    0x34: slice(0),  # INDIRECT_BRANCH_TARGETS
    0x36: slice(0),  # SW_WAR
    0x37: slice(0),  # CUDA_API_VERSION
    0x39: slice(0),  # MBARRIER_INSTR_OFFSETS
    0x3D: slice(0),  # CTA_PER_CLUSTER
    0x44: slice(0),  # UNUSED_LOAD_BYTE_OFFSET
    0x45: slice(0),  # KPARAM_INFO_V2
    0x46: slice(0),  # SYSCALL_OFFSETS
    0x55: slice(0),  # ANNOTATIONS: a kind, then instruction offsets
    0x66: slice(0),  # nameless: the word 3 in every kernel of CUDA 13
}


def references(section: NamedSection) -> list[tuple[int | None, int]]:
    """Return (user, used) symbols of a section; user None stands for the owner of the section.

    A description of a function, as in ``.nv.info``, is no use of it.
    """
    if section.header.type == SHT_CUDA_CALLGRAPH:
        return [(caller, callee) for caller, callee in _entries(section, _CALL) if caller and callee >= 0]
    return [] if is_description(section) else [(None, symbol) for symbol in named_symbols(section)]


def named_symbols(section: NamedSection) -> list[int]:
    """Return the symbols that a section of a type in ``HOLDERS`` names, in order."""
    seen: list[int] = []

    def record(symbol: int) -> int:
        seen.append(symbol)
        return symbol

    renumber(section, record)
    return seen


def described_symbols(info: NamedSection, attribute: int) -> list[int]:
    """Return the symbols of the records ``attribute`` of ``.nv.info``, in order."""
    return [
        _WORD.unpack_from(payload)[0]
        for kind, name, _, payload in _records(info)
        if kind == _FORMAT_SIZED and name == attribute and len(payload) >= _WORD.size
    ]


def is_description(section: NamedSection) -> bool:
    """Return whether the section is ``.nv.info`` itself, whose records each describe a function of the cubin."""
    return section.header.type == SHT_CUDA_INFO and section.owner is None


def renumber(section: NamedSection, number: Renumber) -> bytes:
    """Return the bytes of a section of a type in ``HOLDERS`` with every symbol index replaced.

    Descriptions of dropped functions and lists of their calls are left out. Any other use of a dropped symbol raises
    UnfamiliarCubinError.
    """
    if section.header.type == SHT_CUDA_CALLGRAPH:
        return b"".join(_renumbered_calls(section, number))
    if section.header.type == SHT_CUDA_INFO:
        return b"".join(_renumbered_records(section, number))
    layout = RELOCATIONS[section.header.type]
    return b"".join(
        layout.pack(offset, _kept(section, number, info >> 32) << 32 | info & 0xFFFFFFFF, *addend)
        for offset, info, *addend in _entries(section, layout)
    )


def _renumbered_calls(section: NamedSection, number: Renumber) -> Iterator[bytes]:
    for caller, callee in _entries(section, _CALL):
        user = number(caller) if caller else 0
        if user is not None:
            yield _CALL.pack(user, callee if callee < 0 else _kept(section, number, callee))


def _renumbered_records(section: NamedSection, number: Renumber) -> Iterator[bytes]:
    for kind, attribute, value, payload in _records(section):
        head = _RECORD.pack(kind, attribute, value)
        if kind != _FORMAT_SIZED:
            yield head
        elif not is_description(section):
            yield head + _renumbered_words(section, attribute, payload, number)
        elif attribute in _FUNCTION_RECORDS and len(payload) >= _WORD.size:
            function = number(_WORD.unpack_from(payload)[0])
            if function is not None:
                yield head + _WORD.pack(function) + payload[_WORD.size :]
        else:
            raise UnfamiliarCubinError(f"{section.name}: record {attribute:#x} of {len(payload)} bytes")


def _renumbered_words(section: NamedSection, attribute: int, payload: bytes, number: Renumber) -> bytes:
    """Return a record of one kernel with the symbols in it renumbered."""
    if attribute not in _KERNEL_RECORDS:
        raise UnfamiliarCubinError(f"{section.name}: record {attribute:#x} of {len(payload)} bytes")
    symbols = _KERNEL_RECORDS[attribute]
    if symbols == slice(0):
        return payload
    if not payload or len(payload) % _WORD.size:
        raise UnfamiliarCubinError(f"{section.name}: record {attribute:#x} of {len(payload)} bytes")
    words = [word for (word,) in _WORD.iter_unpack(payload)]
    words[symbols] = [_kept(section, number, word) for word in words[symbols]]
    return b"".join(map(_WORD.pack, words))


def _records(section: NamedSection) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (format, attribute, value, the bytes that follow) of an info section."""
    content, position = section.content, 0
    while position < len(content):
        start = position + _RECORD.size
        if start > len(content):
            raise UnfamiliarCubinError(f"{section.name}: ends inside a record at {position}")
        kind, attribute, value = _RECORD.unpack_from(content, position)
        position = start + (value if kind == _FORMAT_SIZED else 0)
        if not 1 <= kind <= _FORMAT_SIZED or position > len(content):
            raise UnfamiliarCubinError(f"{section.name}: record of format {kind} that ends at {position}")
        yield kind, attribute, value, content[start:position]


def _entries(section: NamedSection, layout: struct.Struct) -> Iterator[tuple[int, ...]]:
    if len(section.content) % layout.size:
        raise UnfamiliarCubinError(f"{section.name}: {len(section.content)} bytes, entries have {layout.size}")
    return layout.iter_unpack(section.content)


def _kept(section: NamedSection, number: Renumber, symbol: int) -> int:
    new = number(symbol)
    if new is None:
        raise UnfamiliarCubinError(f"{section.name}: uses symbol {symbol} of a kernel that is dropped")
    return new
