"""The error of a rewritten or compiled model against the original, on a few random inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from nimblec.base.difference import difference, numbers
from nimblec.base.errors import CompileError
from nimblert import golden
from nimblert.plan import Program

_SEEDS = 3

Compute: TypeAlias = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]
"""A model: its outputs in program order, from inputs by name."""


def spread(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """The largest difference of two runs, relative to the largest magnitude of an output."""
    return max((difference(a, b).relative for a, b in zip(first, second, strict=True)), default=0.0)


def report(program: Program, original: Compute, changed: Compute, allowed: float | None) -> Iterator[str]:
    """A sentence for each output with the largest and the mean of its relative differences.

    Raises CompileError for one that differs by more than ``allowed``.
    """
    runs = [(original(inputs), changed(inputs)) for inputs in _inputs(program)]
    for position, output in enumerate(program.outputs):
        pairs = [(expected[position], found[position]) for expected, found in runs]
        largest = max(difference(a, b).relative for a, b in pairs)
        mean = sum(_mean_error(a, b) for a, b in pairs) / len(pairs)
        sentence = (
            f"output {output.name!r} differs from -O0 by at most {largest:.2g}, {mean:.2g} on average, of its largest "
            "magnitude"
        )
        if allowed is not None and not largest <= allowed:
            raise CompileError(f"{sentence}; --max-error allows {allowed:.2g}: use -O0 and --precision keep")
        yield sentence


def _inputs(program: Program) -> Iterator[dict[str, np.ndarray]]:
    return (golden.draw_inputs(program, seed) for seed in range(_SEEDS))


def _mean_error(expected: np.ndarray, found: np.ndarray) -> float:
    """The mean difference of what is finite in both, relative to the largest magnitude expected; 0 where nothing is."""
    a, b = numbers(expected), numbers(found)
    finite = np.isfinite(a) & np.isfinite(b)
    scale = float(np.abs(a[finite]).max(initial=0.0))
    return float(np.abs(a[finite] - b[finite]).mean()) / scale if scale > 0 else 0.0
