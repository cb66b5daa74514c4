"""What operators make of padding that holds a known number; None stands for any number."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from nimblec.padding.values import Number

Fold: TypeAlias = Callable[[Sequence[Number | None]], Number | None]
"""The result of an elementwise operator, given its operands."""

IsNeutral: TypeAlias = Callable[[Number | None], bool]
"""Whether operands that are all this number change no result of a reduction."""

LARGE = 1e3
"""A masked score of this magnitude has the weight 0 after a softmax; what is added to it changes nothing."""


def to_any(_: Sequence[Number | None]) -> None:
    """Fold numbers to any."""


def if_equal(fills: Sequence[Number | None]) -> Number | None:
    """Fold numbers to the one that they all are."""
    return fills[0] if all(fill == fills[0] for fill in fills) else None


def of_choice(fills: Sequence[Number | None]) -> Number | None:
    """Fold the condition and the values of a choice."""
    condition, one, other = fills
    return if_equal((one, other)) if condition is None else one if condition else other


def _of_sum(fills: Sequence[Number | None]) -> Number | None:
    large = [fill for fill in fills if fill is not None and abs(fill) >= LARGE]
    return large[0] if len(large) == 1 else None


ABSORBING: Mapping[str, Fold] = {
    "add": _of_sum,
    "sub": lambda fills: _of_sum((fills[0], None if fills[1] is None else -fills[1])),
    "mul": lambda fills: 0 if any(map(is_zero, fills)) else None,
    "div": lambda fills: 0 if is_zero(fills[0]) else None,
    "and": lambda fills: False if any(map(is_zero, fills)) else None,
    "or": lambda fills: True if any(fills) else None,
    "where": of_choice,
}
"""What operators make of numbers of which some decide alone."""


def never(_: Number | None) -> bool:
    """Find no number neutral."""
    return False


def is_zero(fill: Number | None) -> bool:
    """Return whether padding adds nothing to a sum."""
    return fill is not None and fill == 0


def is_one(fill: Number | None) -> bool:
    """Return whether padding changes no product."""
    return fill is not None and fill == 1


def is_low(fill: Number | None) -> bool:
    """Return whether padding has no weight in a softmax."""
    return fill is not None and fill <= -LARGE


def is_least(dtype: np.dtype, *, of_minimum: bool = False) -> IsNeutral:
    """Return whether padding is no maximum of a dtype, or no minimum."""
    sign = -1 if of_minimum else 1
    if dtype.kind == "b":
        return lambda fill: fill is not None and bool(fill) is of_minimum
    if dtype.kind in "iu":
        end = np.iinfo(dtype).max if of_minimum else np.iinfo(dtype).min
        return lambda fill: fill is not None and fill == end
    return lambda fill: fill is not None and is_low(sign * fill)
