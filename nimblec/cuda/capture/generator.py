"""The memory of torch's generator in a capture, and the state of a plan in its place.

A kernel that draws random numbers in a capture gets the addresses of a seed and of an offset, and a number that it adds
to the offset. Torch allocates the two, of eight bytes each, when a capture with a new generator begins, and fills them
before each replay. In a plan, the kernels get the addresses of its state instead.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nimblec.base.errors import TraceError
from nimblec.cuda.capture.allocator import Place, Target, Zone
from nimblec.pytorch.generator import MARK

_NBYTES = 8


class GeneratorError(TraceError):
    """Torch's generator is not found in a capture in its expected place or form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorMemory:
    """Allocations of a capture: those of a generator, and those of the state that replaces them in a plan."""

    seed: int
    offset: int
    state_seed: int
    state_offset: int

    def replaced(self, targets: Sequence[tuple[int, Target]]) -> tuple[tuple[int, Target], ...]:
        """Return the targets of a launch's parameters, by offset, with the state in place of the generator.

        Raises GeneratorError unless the address of the seed comes right before that of the offset.
        """
        held = dict(targets)
        for at, target in targets:
            if self.holds(target):
                first = at if target.index == self.seed else at - _NBYTES
                if (held.get(first), held.get(first + _NBYTES)) != (Target(index=self.seed, offset=0), self._found):
                    raise GeneratorError(
                        f"at byte {at} of its parameters, a kernel has an address of torch's generator otherwise than "
                        "as the seed's followed by the offset's"
                    )
        state = {self.seed: self.state_seed, self.offset: self.state_offset}
        return tuple(
            (at, Target(index=state[target.index], offset=0) if self.holds(target) else target)
            for at, target in targets
        )

    def holds(self, target: Target) -> bool:
        """Return whether a target is in the generator's memory."""
        return target.place is Place.CAPTURE and target.index in (self.seed, self.offset)

    @property
    def _found(self) -> Target:
        return Target(index=self.offset, offset=0)


def find_memory(
    zone: Zone, begun: Sequence[int], state: Sequence[int | None], read: Callable[[int, int], bytes]
) -> GeneratorMemory:
    """Find the memory of a generator with seed `MARK`; its capture began with the allocations ``begun`` in ``zone``.

    ``state`` are the allocations of the state's seed and offset, None for one that was not found; ``read`` reads device
    memory by address and size. Raises GeneratorError for other allocations or contents than expected.
    """
    sizes = [zone.sizes[index] for index in begun]
    if sizes != [_NBYTES, _NBYTES]:
        raise GeneratorError(f"torch began a capture by allocating {sizes} bytes, expected {[_NBYTES, _NBYTES]}")
    seed, offset = state
    if seed is None or offset is None or {zone.sizes[seed], zone.sizes[offset]} != {_NBYTES}:
        raise GeneratorError("seed and offset of the state have no memory of their own on the device")
    words = [struct.unpack("<q", read(zone.addresses[index], _NBYTES))[0] for index in begun]
    if words != [MARK, 0]:
        raise GeneratorError(f"torch began a capture with {words} where seed and offset are expected, {[MARK, 0]}")
    return GeneratorMemory(seed=begun[0], offset=begun[1], state_seed=seed, state_offset=offset)
