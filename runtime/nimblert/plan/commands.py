"""Commands, the steps of a program, and the places in memory that they access."""

import enum
from dataclasses import dataclass
from typing import TypeAlias


class Region(enum.IntEnum):
    """The memory that a pointer is relative to.

    ARENA holds values of one run, WEIGHTS constants, STATE values that are kept from run to run. INPUT and OUTPUT are
    one region for each index.
    """

    ARENA = 0
    WEIGHTS = 1
    INPUT = 2
    OUTPUT = 3
    STATE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """A byte address: ``offset`` bytes from the start of a region.

    ``index`` is the number of the input or output region, 0 elsewhere. The offset of a relocation
    may lie outside its region: some kernels take the base address minus a padding.
    """

    region: Region
    index: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """The 8 bytes at ``param_offset`` of a parameter buffer become the address of ``pointer``."""

    param_offset: int
    pointer: Pointer


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A byte range that a command reads or writes."""

    pointer: Pointer
    nbytes: int


Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run a kernel.

    ``params`` is the parameter buffer, zero where a relocation goes. On the CPU target it is an array of pointers, one
    relocation each, in the order of the kernel's parameters. ``cluster`` is (0, 0, 0) for a launch without clusters.
    ``programmatic``: the edge from the previous launch on its stream is a programmatic one (the kernel may start before
    that launch has ended, and waits for it itself). ``op`` indexes `Program.ops`; ``duration_ns`` is the time measured
    at compilation, 0 if it was not.
    """

    stream: int
    op: int
    kernel: int
    params: bytes
    relocations: tuple[Relocation, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    cluster: Dim3 = (0, 0, 0)
    dynamic_smem_nbytes: int = 0
    cooperative: bool = False
    programmatic: bool = False
    duration_ns: int = 0

    def __repr__(self) -> str:
        counts = f"{len(self.reads)} reads, {len(self.writes)} writes"
        return f"Launch(kernel={self.kernel}, stream={self.stream}, op={self.op}, grid={self.grid}, {counts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memcpy:
    """Copy ``nbytes`` bytes from ``src`` to ``dst``."""

    stream: int
    op: int
    dst: Pointer
    src: Pointer
    nbytes: int
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memset:
    """Write ``count`` elements of ``element_nbytes`` (1, 2 or 4) bytes, each ``value``."""

    stream: int
    op: int
    dst: Pointer
    value: int
    element_nbytes: int
    count: int
    duration_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record ``event`` after the work issued so far on ``stream``; each event is recorded once."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Have later commands on ``stream`` wait for the work that ``event`` was recorded after."""

    stream: int
    event: int


Command: TypeAlias = Launch | Memcpy | Memset | Record | Wait
Work: TypeAlias = Launch | Memcpy | Memset
