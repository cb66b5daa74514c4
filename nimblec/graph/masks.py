"""Constant attention masks: what they hide."""

from collections.abc import Sequence

import torch
from torch import Tensor

HIDDEN = -1e4
"""A constant score of this or less hides a position as minus infinity does."""


def hides_nothing(mask: Tensor) -> bool:
    """Return whether a mask (True where a key is read, or what to add to the scores) changes nothing."""
    return bool(mask.all()) if mask.dtype == torch.bool else bool((mask == 0).all())


def is_causal(mask: Tensor, lengths: Sequence[int]) -> bool:
    """Return whether a mask shows each query the keys up to its own; ``lengths`` (queries, keys) must be equal."""
    if lengths[0] != lengths[1] or tuple(mask.shape[-2:]) != tuple(lengths):
        return False
    earlier = torch.ones(tuple(lengths), dtype=torch.bool, device=mask.device).tril().expand(mask.shape)
    if mask.dtype == torch.bool:
        return torch.equal(mask, earlier)
    return bool((mask[~earlier] <= HIDDEN).all() and (mask[earlier] == 0).all())
