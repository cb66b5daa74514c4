"""Tell pointers from numbers: compare the parameters of two captures in different memory."""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from nimblec.base.errors import UnsupportedModelError
from nimblec.cuda.capture.allocator import Place, Shift, Target
from nimblec.cuda.capture.earlier import EarlierMemory
from nimblec.cuda.capture.foreign import ForeignMemory, HostMemoryError
from nimblec.cuda.capture.generator import GeneratorError, GeneratorMemory
from nimblert.check.verify import MAX_BIAS

_LOWEST_POINTER = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RelocatedParams:
    """A parameter buffer with zeros in place of addresses, and the targets of these."""

    params: bytes
    targets: tuple[tuple[int, Target], ...]


class Relocator:
    """Classifies the 8-byte words of parameter buffers.

    A word that moved like an allocation is a pointer to it. Any other byte that differs is stale padding, and becomes
    zero. A word that did not move is a number, unless it is the address of an ``earlier`` allocation, or of memory that
    CUDA knows and the allocator does not. The address of another model's weight may be stale, too: it is a number
    unless the op has a tensor there. Pointers to a ``generator`` become pointers to the state that replaces it.
    """

    def __init__(
        self,
        shift: Shift,
        earlier: EarlierMemory,
        foreign: ForeignMemory,
        generator: GeneratorMemory | None = None,
    ) -> None:
        self._shift = shift
        self._earlier = earlier
        self._foreign = foreign
        self._generator = generator

    def relocate(
        self, first: bytes, second: bytes, *, reports: bool = False, declared: Container[int] | None = None
    ) -> RelocatedParams:
        """Return the parameters of one launch, from its buffers in the two captures.

        ``declared`` are the earlier allocations that hold tensors of the launch's op; None if these are not known.
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
                target = self._classify(int(a[i]), int(b[i]), declared)
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
        """Return the target of an address in a copy or a fill."""
        target = self._classify(first, second, None)
        if target is not None and self._generator is not None and self._generator.holds(target):
            raise GeneratorError("a copy or a fill touches the memory of torch's generator")
        if target is None:
            raise UnsupportedModelError(
                f"it uses device memory at {first:#x} that torch did not allocate: allocate it as a tensor of torch"
            )
        return target

    def _classify(self, first: int, second: int, declared: Container[int] | None) -> Target | None:
        if first != second:
            found = self._shift.locate(first, second)
            return Target(index=found[0], offset=found[1]) if found and abs(found[1]) <= MAX_BIAS else None
        if self._earlier.reserves(first):
            return self._in_earlier(first, declared)
        index = self._foreign.find(first) if first >= _LOWEST_POINTER else None
        if index is None:
            return None
        return Target(index=index, offset=first - self._foreign.addresses[index], place=Place.FOREIGN)

    def _in_earlier(self, address: int, declared: Container[int] | None) -> Target | None:
        index = self._earlier.find(address)
        if index is None:
            return None
        if declared is not None and index not in declared and self._earlier.is_anothers(index):
            return None
        return Target(index=index, offset=address - self._earlier.addresses[index], place=Place.EARLIER)
