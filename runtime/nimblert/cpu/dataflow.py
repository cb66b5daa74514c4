"""The flow of data: which commands write the bytes that a command reads, and which read what it writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nimblert.plan import Access, Program, Region, pieces
from nimblert.plan.pieces import Ints

BEFORE = -1
"""The writer of bytes that no command has written."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The flow of data of a program without hazards: a read gets the bytes of the last write issued before it.

    Commands are given by their indices. The program's outputs count as read by a command after the last.
    """

    _writers: Mapping[tuple[int, Access], frozenset[int]]
    _readers: Mapping[int, Sequence[tuple[int, Access]]]

    def writers(self, command: int, access: Access) -> frozenset[int]:
        """The commands whose bytes ``command`` reads; `BEFORE` for bytes that no command wrote."""
        return self._writers.get((command, access), frozenset((BEFORE,)))

    def reads(self, command: int) -> Sequence[tuple[int, Access]]:
        """The reads of bytes that ``command`` wrote, each with the command that reads."""
        return self._readers.get(command, ())


def dataflow(program: Program) -> Dataflow:
    """Follow the bytes of a program through its commands. Linear in its accesses and their pieces."""
    works = list(program.work)
    returned = [Access(pointer=tensor.pointer, nbytes=tensor.span_nbytes) for tensor in program.outputs]
    memory = {
        region: _Memory(np.unique(np.concatenate((pieces.cuts(touched), _ends(returned, region)))))
        for region, touched in pieces.touches([work for _, work in works]).items()
        if touched.write.any()
    }
    all_writers: dict[tuple[int, Access], frozenset[int]] = {}
    all_readers: dict[int, list[tuple[int, Access]]] = {}

    def read(command: int, access: Access) -> None:
        found = memory.get((access.pointer.region, access.pointer.index))
        if found is None or not access.nbytes:
            return
        writers = found.writers(access)
        all_writers[command, access] = writers
        for writer in writers - {BEFORE}:
            all_readers.setdefault(writer, []).append((command, access))

    for command, work in works:
        for access in pieces.reads(work):
            read(command, access)
        for access in pieces.writes(work):
            if access.nbytes:
                memory[access.pointer.region, access.pointer.index].write(access, command)
    for access in returned:
        read(len(program.commands), access)
    return Dataflow(all_writers, all_readers)


class _Memory:
    """The last writer of each piece of a region."""

    def __init__(self, borders: Ints) -> None:
        self._borders = borders
        self._last = np.full(len(borders), BEFORE)

    def write(self, access: Access, command: int) -> None:
        self._last[self._pieces(access)] = command

    def writers(self, access: Access) -> frozenset[int]:
        return frozenset(self._last[self._pieces(access)].tolist())

    def _pieces(self, access: Access) -> slice:
        start = access.pointer.offset
        return slice(*np.searchsorted(self._borders, (start, start + access.nbytes)))


def _ends(accesses: list[Access], region: tuple[Region, int]) -> Ints:
    """The offsets at which accesses to a region begin and end."""
    within = [a for a in accesses if (a.pointer.region, a.pointer.index) == region]
    return np.array([n for a in within for n in (a.pointer.offset, a.pointer.offset + a.nbytes)], np.int64)
