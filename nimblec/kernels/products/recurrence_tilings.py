"""How a recurrent layer is divided into blocks, all of which must be resident, and the candidates for a GPU."""

from dataclasses import dataclass
from math import log2

from nimblec.kernels.gpu import GPU
from nimblec.kernels.images import ALIGNMENT_NBYTES
from nimblec.kernels.shapes import next_power_of_2
from nimblec.kernels.tilings import NumberedTiling

_WARPS = 8
"""Warps that a multiprocessor holds however many registers they use: a thread has at most 255 of 65,536."""
_REGISTERS = 192
"""Of a thread, for weights and the hidden state; the rest is for addresses and the cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The steps of an LSTM (four gates) or a GRU (three), in one or both directions."""

    gates: int
    steps: int
    batch: int
    hidden: int
    directions: int
    itemsize: int

    @property
    def width(self) -> int:
        """The hidden size as blocks see it: a power of two."""
        return next_power_of_2(self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceTiling(NumberedTiling):
    """A block computes ``units`` hidden units of ``rows`` sequences."""

    units: int
    rows: int
    num_warps: int

    def blocks(self, shape: Recurrence) -> int:
        """Return how many blocks a layer takes."""
        return shape.directions * (shape.hidden // self.units) * (shape.batch // self.rows)

    def values(self, shape: Recurrence) -> int:
        """Return how many elements of the hidden state of a sequence each thread multiplies."""
        return shape.width * min(self.units, 4) // (32 * self.num_warps)

    def registers(self, shape: Recurrence) -> int:
        """Return how many registers of a thread hold weights and the hidden state."""
        units = self.units // min(self.units, 4)
        return self.values(shape) * (shape.gates * units + self.rows)

    def fits(self, shape: Recurrence, gpu: GPU) -> bool:
        """Return whether the blocks can all be resident, and read whole pieces of the hidden state."""
        values = self.values(shape)
        piece = min(ALIGNMENT_NBYTES // shape.itemsize, values)
        return (
            values * shape.itemsize >= 4
            and shape.hidden % piece == 0
            and self.registers(shape) <= _REGISTERS
            and self.blocks(shape) <= gpu.multiprocessors * (_WARPS // self.num_warps)
        )


def recurrence_candidates(shape: Recurrence, gpu: GPU, *, limit: int = 6) -> list[RecurrenceTiling]:
    """Return at most ``limit`` tilings, first those close to 8 units and 4 warps, which are fastest on an H200."""
    found = [
        RecurrenceTiling(units=units, rows=rows, num_warps=num_warps)
        for units in (2, 4, 8, 16, 32)
        if shape.hidden % units == 0
        for rows in range(1, shape.batch + 1)
        if shape.batch % rows == 0
        for num_warps in (1, 2, 4, 8)
    ]

    def cost(tiling: RecurrenceTiling) -> tuple[float, list[int]]:
        apart = abs(log2(tiling.units / 8)) + abs(log2(tiling.num_warps / 4))
        return apart + tiling.registers(shape) * tiling.rows / 10_000, tiling.numbers

    return sorted((tiling for tiling in found if tiling.fits(shape, gpu)), key=cost)[:limit]
