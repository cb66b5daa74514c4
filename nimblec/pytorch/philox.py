"""Philox 4x32-10 in plain integer operators.

J. K. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import torch
from torch import Tensor

_WORD = (1 << 32) - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LEADING = _WORD - 255
"""The leading 24 bits of a word: what a float32 holds exactly."""


def philox(seed: Tensor, counter: Tensor) -> list[Tensor]:
    """Return four words (int64, 0 to 2^32 - 1) for each ``counter`` (int64), the low half of Philox's own."""
    keys = [seed & _WORD, seed >> 32 & _WORD]
    zero = torch.zeros_like(counter)
    words = [counter & _WORD, counter >> 32 & _WORD, zero, zero]
    for number in range(_ROUNDS):
        left, right = ((key + number * weyl) & _WORD for key, weyl in zip(keys, _WEYL, strict=True))
        # Products of int64 are modulo 2^64, so that their upper words are right, too.
        first, second = (words[i] * m for i, m in zip((0, 2), _MULTIPLIERS, strict=True))
        words = [
            (second >> 32 & _WORD) ^ words[1] ^ left,
            second & _WORD,
            (first >> 32 & _WORD) ^ words[3] ^ right,
            first & _WORD,
        ]
    return words


def uniform(seed: Tensor, counters: Tensor, count: int) -> Tensor:
    """Return ``count`` float32 numbers in [0, 1), four for each of the ``counters``."""
    words = torch.cat(philox(seed, counters))[:count]
    return (words & _LEADING).to(torch.float32) * 2.0**-32
