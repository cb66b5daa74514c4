"""Tell pointers from numbers: compare the parameters of two captures in different memory."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from nimblec.cuda.recording.allocator import Place, Shift, Target, Zone
from nimblec.cuda.recording.foreign import ForeignMemory, HostMemoryError
from nimblec.cuda.recording.generator import GeneratorError, GeneratorMemory
from nimblec.errors import UnsupportedModelError
from nimblert.rules.verify import MAX_BIAS

_LOWEST_POINTER = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocatedParams:
    """A parameter buffer with zeros in place of addresses, and the targets of these."""

    params: bytes
    targets: tuple[tuple[int, Target], ...]


class Relocator:
    """Classifies the 8-byte words of parameter buffers.

    A word that moved like an allocation is a pointer to it. Any other byte that differs is padding with stale stack
    contents, and becomes zero (the bytes beside it may be a one-byte number). A word that did not move is a number,
    unless it is the address of a resident allocation, or of memory that CUDA knows and the allocator does not.

    ``recorder`` are the recorder's own addresses in the resident zone, which no kernel of a model reads: padding may
    hold them as stale pointers. Pointers to the memory of a ``generator`` become pointers to the state in its place.
    """

    def __init__(
        self,
        shift: Shift,
        resident: Zone,
        foreign: ForeignMemory,
        recorder: Collection[int] = frozenset(),
        generator: GeneratorMemory | None = None,
    ) -> None:
        self._shift = shift
        self._recorder = recorder
        self._resident = resident
        self._foreign = foreign
        self._generator = generator

    def relocate(self, first: bytes, second: bytes, *, reports: bool = False) -> RelocatedParams:
        """The parameters of one launch, from its buffers in the two captures.

        ``reports``: the kernel takes the address of host memory for reports, or null; the address becomes null. For
        any other kernel an address of host memory raises UnsupportedModelError. Raises GeneratorError if the kernel
        gets the generator in another form than a seed followed by an offset.
        """
        words = len(first) // 8
        a = np.frombuffer(first, "<u8", words)
        b = np.frombuffer(second, "<u8", words)
        kept = np.frombuffer(first, np.uint8).copy()
        kept[kept != np.frombuffer(second, np.uint8)] = 0
        targets = []
        for i in np.flatnonzero((a != b) | (a >= _LOWEST_POINTER)).tolist():
            try:
                target = self._classify(int(a[i]), int(b[i]))
            except HostMemoryError as exc:
                if not reports:
                    raise UnsupportedModelError(f"at byte {8 * i} of its parameters, {exc}") from exc
                kept[8 * i : 8 * i + 8] = 0
                continue
            if target is not None:
                targets.append((8 * i, target))
                kept[8 * i : 8 * i + 8] = 0
        pointed = tuple(targets) if self._generator is None else self._generator.replaced(targets)
        return RelocatedParams(params=kept.tobytes(), targets=pointed)

    def locate(self, first: int, second: int) -> Target:
        """The target of an address in a copy or a fill."""
        target = self._classify(first, second)
        if target is not None and self._generator is not None and self._generator.holds(target):
            raise GeneratorError("a copy or a fill touches the memory of torch's generator")
        if target is None:
            raise UnsupportedModelError(
                f"it uses device memory at {first:#x} that torch did not allocate: allocate it as a tensor of torch"
            )
        return target

    def _classify(self, first: int, second: int) -> Target | None:
        if first != second:
            found = self._shift.locate(first, second)
            return Target(index=found[0], offset=found[1]) if found and abs(found[1]) <= MAX_BIAS else None
        index = self._resident.find(first)
        if index is not None:
            address = self._resident.addresses[index]
            alive = address in self._resident.live and address not in self._recorder
            return Target(index=index, offset=first - address, place=Place.RESIDENT) if alive else None
        if first < _LOWEST_POINTER or self._resident.base <= first < self._resident.end:
            return None
        index = self._foreign.find(first)
        if index is None:
            return None
        return Target(index=index, offset=first - self._foreign.addresses[index], place=Place.FOREIGN)
