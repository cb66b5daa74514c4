"""The memory in which captured kernels find the seed and the offset of torch's generator, and the state in its place.

A kernel that draws random numbers in a capture is given two addresses, of a seed and of an offset, and the number by
which it adds to the offset itself. Torch allocates the two, of eight bytes each, when a capture with a new generator
begins, and fills them before each replay. A plan has its state there instead.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nimblec.cuda.recording.allocator import Place, Target, Zone
from nimblec.errors import TraceError
from nimblec.frontend.pytorch.generator import MARK

_NBYTES = 8


class GeneratorError(TraceError):
    """Torch's generator is not found in a capture where, or as, it is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorMemory:
    """Allocations of a capture: those of a generator, and those of the state that a plan has in their place."""

    seed: int
    offset: int
    state_seed: int
    state_offset: int

    def replaced(self, targets: Sequence[tuple[int, Target]]) -> tuple[tuple[int, Target], ...]:
        """What the words of a launch's parameters point to, by their place in them, with the state for the generator.

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
        """Whether something points to the generator's memory."""
        return target.place is Place.CAPTURE and target.index in (self.seed, self.offset)

    @property
    def _found(self) -> Target:
        return Target(index=self.offset, offset=0)


def find_memory(
    zone: Zone, begun: Sequence[int], state: Sequence[int | None], read: Callable[[int, int], bytes]
) -> GeneratorMemory:
    """The memory of a generator that was marked when a capture began, which made the allocations ``begun`` in a zone.

    ``state`` are the allocations of seed and offset in a plan, None for one that is not found; ``read`` gives bytes
    of the device at an address. Raises GeneratorError for any other allocations, or contents.
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
