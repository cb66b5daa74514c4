"""Two runs of a model on equal inputs: a graph holds neither what is random nor a state that lies outside it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nimblec.difference import Difference, difference
from nimblec.errors import UnsupportedModelError

_ROUNDING = 1e-3
"""Of the largest magnitude: by so much sums of several threads may differ."""
_HALF_ULPS = 8
"""The same in units of the last place, for half precision."""
_TIES = 0.01
"""The share of integers and bools that rounding may decide: an argmax of equals."""


def refuse_differing(
    name: str, first: Sequence[tuple[str, Tensor]], second: Sequence[tuple[str, Tensor]], remedy: str
) -> None:
    """Raise UnsupportedModelError where outputs of two runs, by name, differ by more than rounding.

    ``remedy`` ends the sentence: what becomes of a state, and what to do.
    """
    found = dict(second)
    for output, before in first:
        if output not in found or not _differ_by_rounding(before, found[output]):
            raise UnsupportedModelError(
                f"{name}: two runs on equal inputs differ in output {output!r}: the model draws random numbers or has "
                f"a state, {remedy}"
            )


def compared(expected: Tensor, found: Tensor) -> Difference:
    """How far two tensors are from each other; infinitely where their shapes differ."""
    if expected.shape != found.shape:
        return Difference(absolute=math.inf, relative=math.inf, exact=False)
    wide = torch.float64 if expected.is_floating_point() else expected.dtype
    tensors = (tensor.detach().cpu().to(wide).resolve_conj().resolve_neg() for tensor in (expected, found))
    return difference(*(tensor.numpy() for tensor in tensors))


def _differ_by_rounding(first: Tensor, second: Tensor) -> bool:
    difference = compared(first, second)
    if difference.exact and first.shape == second.shape:
        return int((first != second).sum()) <= _TIES * first.numel()
    eps = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    return difference.within(max(_ROUNDING, _HALF_ULPS * eps))
