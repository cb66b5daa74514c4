"""Weights close to those of a model and all different: an optimisation that holds for them holds for any."""

import hashlib
from collections.abc import Mapping

import numpy as np

_SMALL_NBYTES = 1024
"""Smaller weights may be drawn equal by chance."""


def perturbed(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Other weights, by name: a little larger than these, so that variances stay positive, and no two equal."""
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
        if made.nbytes <= _SMALL_NBYTES:
            taken.add(made.tobytes())
        found[name] = made
    return found
