"""The golden record: a seeded run and digests of its outputs, so that any machine can repeat and check it.

Inputs come from numpy's legacy generator (Mersenne Twister, polar Gaussian), whose stream NEP 19 freezes: the same seed
gives the same inputs under every numpy.
"""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nimblert.arrays.layouts import numpy_dtype
from nimblert.plan import Golden, GoldenOutput, Program

SAMPLE_COUNT = 64
"""The most values of an output that are kept."""


class Verdict(enum.StrEnum):
    """How an output compares with the one that the plan recorded."""

    BIT_EXACT = "bit-exact"
    WITHIN_TOLERANCE = "within tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One output against its golden record.

    ``difference`` is the largest difference of a sampled value, relative to the largest magnitude of the output
    (infinite where shapes, NaNs or infinities differ); ``allowed`` is the largest permitted.
    """

    verdict: Verdict
    difference: float
    allowed: float

    def __str__(self) -> str:
        """Return the verdict, with its figures where bits differ."""
        if self.verdict is Verdict.BIT_EXACT:
            return str(self.verdict)
        if self.verdict is Verdict.DIFFERENT and self.difference <= self.allowed:
            return "different, though the sampled values agree"
        figures = f"{self.difference:.2g} of the largest magnitude, {self.allowed:.2g} allowed"
        return f"{self.verdict} ({figures})"


def draw_inputs(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Return one array for each input of ``program``, in C order; ``seed`` is 0 to 2**64 - 1.

    Every input has a random stream of its own, so that adding an input does not change the others. Floats and parts of
    complex numbers are standard normal values rounded to the dtype; integers and bools are uniform in the tensor's
    ``sample_range``, by default {0, 1}.
    """
    return {
        tensor.name: draw_array(numpy_dtype(tensor.dtype), tensor.shape, tensor.sample_range, seed, position)
        for position, tensor in enumerate(program.inputs)
    }


def draw_array(
    dtype: np.dtype[Any], shape: Sequence[int], sample_range: tuple[int, int] | None, seed: int, position: int
) -> np.ndarray:
    """Return the array that `draw_inputs` draws for the input at ``position``."""
    stream = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, position])
    if dtype.kind in "biu":
        low, high = sample_range or (0, 1)
        wide = np.uint64 if low >= 0 else np.int64
        return np.asarray(stream.randint(low, high + 1, shape, dtype=wide)).astype(dtype)
    if dtype.kind == "c":
        real, imaginary = (stream.standard_normal(shape) for _ in range(2))
        return np.asarray(real + 1j * imaginary).astype(dtype)
    return np.asarray(stream.standard_normal(shape)).astype(dtype)


def digest(array: np.ndarray) -> bytes:
    """Hash the bytes of ``array`` in C order by SHA-256 (32 bytes)."""
    return hashlib.sha256(_flat(array).view(np.uint8).data).digest()


def samples(array: np.ndarray) -> tuple[float, ...]:
    """Return up to 64 values of ``array``, evenly spaced in C order, both ends included.

    A complex array counts as its real and imaginary parts in turn.
    """
    parts = _parts(array)
    count = min(parts.size, SAMPLE_COUNT)
    positions = [i * (parts.size - 1) // max(count - 1, 1) for i in range(count)]
    return tuple(float(value) for value in parts[positions])


def record(seed: int, outputs: Sequence[np.ndarray], tolerance: float) -> Golden:
    """Return the golden record of a run on ``draw_inputs(program, seed)``; ``outputs`` are in program order."""
    kept = tuple(GoldenOutput(sha256=digest(output), samples=samples(output)) for output in outputs)
    return Golden(seed=seed, tolerance=tolerance, outputs=kept)


def check(golden: Golden, outputs: Sequence[np.ndarray], *, rounding: float = 0.0) -> tuple[Comparison, ...]:
    """Compare ``outputs``, in program order, with the golden record, one by one.

    ``rounding`` is a relative difference to permit where this machine may round differently from the one that made the
    plan; the record's own tolerance is always permitted.
    """
    allowed = max(golden.tolerance, rounding)
    return tuple(_compare(expected, actual, allowed) for expected, actual in zip(golden.outputs, outputs, strict=True))


def _compare(expected: GoldenOutput, actual: np.ndarray, allowed: float) -> Comparison:
    if digest(actual) == expected.sha256:
        return Comparison(verdict=Verdict.BIT_EXACT, difference=0.0, allowed=allowed)
    difference = _difference(expected.samples, actual)
    within = allowed > 0 and difference <= allowed
    verdict = Verdict.WITHIN_TOLERANCE if within else Verdict.DIFFERENT
    return Comparison(verdict=verdict, difference=difference, allowed=allowed)


def _difference(expected: tuple[float, ...], actual: np.ndarray) -> float:
    if len(expected) != min(_parts(actual).size, SAMPLE_COUNT):
        return float("inf")
    before, after = np.array(expected), np.array(samples(actual))
    differ = ~((before == after) | (np.isnan(before) & np.isnan(after)))
    if not differ.any():
        return 0.0
    parts = _parts(actual).astype(np.float64)
    scale = np.abs(parts[np.isfinite(parts)]).max(initial=0.0)
    with np.errstate(over="ignore"):  # a record may hold any number, and an infinite difference is one
        gap = np.abs(before[differ] - after[differ]).max()
    return float(gap / scale) if scale > 0 and np.isfinite(gap) else float("inf")


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1)


def _parts(array: np.ndarray) -> np.ndarray:
    flat = _flat(array)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
