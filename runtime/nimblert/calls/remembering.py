"""What was found for a key is remembered, for as many keys as callers are likely to use."""

from typing import TypeVar

_MOST_KEPT = 256
"""The most keys that are remembered, as layouts of an input or shapes of a call."""

_K = TypeVar("_K")
_T = TypeVar("_T")


def remembered(known: dict[_K, _T], key: _K, found: _T) -> _T:
    """Remember what was found for this key; forget all others once there are too many."""
    if len(known) >= _MOST_KEPT:
        known.clear()
    known[key] = found
    return found
