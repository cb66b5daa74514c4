"""The difference of an array from the one expected."""

from dataclasses import dataclass

import numpy as np

_LEAST = float(np.finfo(np.float32).tiny)
"""The magnitude below which float32 loses its digits, and hardware may round to zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest difference of two arrays: absolute, and relative to the largest magnitude expected.

    That is taken for 2**-126 where it is smaller. Infinite where only one of them has a NaN or an infinity. ``exact``:
    the numbers are integers or bools, which must be equal.
    """

    absolute: float
    relative: float
    exact: bool

    def within(self, tolerance: float) -> bool:
        """Return whether the relative difference is at most ``tolerance``; integers and bools must be equal."""
        return self.absolute == 0 or (not self.exact and self.relative <= tolerance)

    def __str__(self) -> str:
        """Return both figures, or "equal"."""
        if self.absolute == 0:
            return "equal"
        return f"largest difference {self.absolute:.3g}, {self.relative:.2g} of the largest magnitude"


def difference(expected: np.ndarray, found: np.ndarray) -> Difference:
    """Compare two arrays of one dtype, element by element; those of two shapes differ infinitely."""
    exact = expected.dtype.kind in "biu"
    if expected.shape != found.shape:
        return Difference(absolute=float("inf"), relative=float("inf"), exact=exact)
    if not expected.size:
        return Difference(absolute=0.0, relative=0.0, exact=exact)
    if exact:
        # Exact also where float64 is not; differences of int64 wrap round to what they are modulo 2**64.
        high, low = np.maximum(expected, found), np.minimum(expected, found)
        gap = float((high.astype(np.uint64) - low.astype(np.uint64)).max())
        scale = float(np.abs(expected.astype(np.float64)).max())
    else:
        a, b = numbers(expected), numbers(found)
        differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        with np.errstate(invalid="ignore"):  # inf - inf
            gaps = np.abs(a[differ] - b[differ])
        gap = float(gaps.max(initial=0.0)) if np.isfinite(gaps).all() else float("inf")
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    relative = gap / max(scale, _LEAST) if scale > 0 or gap < _LEAST else float("inf")
    return Difference(absolute=gap, relative=relative, exact=exact)


def relative_gaps(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the difference of each element of two arrays of floats, relative to the largest magnitude expected.

    It is infinite where only one of them has a NaN or an infinity.
    """
    a, b = numbers(expected), numbers(found)
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=_LEAST))
    with np.errstate(invalid="ignore"):  # inf - inf
        gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gaps), np.inf, gaps) / scale


def same_numbers(expected: np.ndarray, found: np.ndarray, tolerance: float) -> bool:
    """Return whether two arrays of one dtype and size hold the same numbers, floats perhaps in another order.

    So another memory layout of the same tensor is recognised, whatever it is.
    """
    if difference(expected.reshape(-1), found.reshape(-1)).within(tolerance):
        return True
    if expected.dtype.kind in "biu":
        return False
    return difference(np.sort(numbers(expected)), np.sort(numbers(found))).within(tolerance)


def numbers(array: np.ndarray) -> np.ndarray:
    """Return the floats of an array as float64, flat; of complex numbers both parts in turn."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat).astype(np.float64)
