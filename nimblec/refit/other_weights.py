"""Weights near those of a model and all different: what becomes of a model with them holds for any weights."""

import hashlib
from collections.abc import Mapping

import numpy as np

_SMALL_NBYTES = 1024
"""Weights of so many bytes may be drawn equal by chance."""


def perturbed(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Other weights for these, by name: a little larger, so that variances stay positive, and no two the same."""
    found: dict[str, np.ndarray] = {}
    taken: set[bytes] = set()
    for name, array in weights.items():
        for attempt in range(1000):
            digits = hashlib.sha256(f"{seed} {attempt} {name}".encode()).digest()
            random = np.random.default_rng(list(digits))
            noise = random.uniform(0.05, 0.1, array.shape)
            made = (np.abs(array.astype(np.float64)) * noise + noise / 8 + array).astype(array.dtype)
            if made.tobytes() not in taken:
                break
        taken.add(made.tobytes() if made.nbytes <= _SMALL_NBYTES else b"")
        found[name] = made
    return found
