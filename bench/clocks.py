"""Samples of a clock: their spread, and whether the machine was quiet meanwhile."""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Samples: TypeAlias = Mapping[str, Sequence[float] | np.ndarray]
"""Microseconds by the name of the clock."""

WARM_UPS, REPEATS = 20, 100
"""Calls before the first sample, and samples of each clock."""
TRIES = 3
MOST_SPREAD = 1.15
"""Ratio of the 95th percentile to the 5th on a quiet machine."""
MOST_LAUNCH_US = 30.0
"""Wall-clock time of a replay beyond its GPU time on a quiet machine."""


def spread(times: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the 5th percentile, median and 95th percentile."""
    return dict(zip(("p5", "median", "p95"), np.percentile(times, (5, 50, 95)).round(4).tolist(), strict=True))


def unrest(figures: Mapping[str, Mapping[str, float]]) -> float:
    """Return how far the spreads of a group of clocks are from those of a quiet machine; above 1 is noisy."""
    found = [(clock["p95"] / clock["p5"] - 1) / (MOST_SPREAD - 1) for clock in figures.values()]
    if {"kernels_us", "replay_us"} <= figures.keys():
        launch_us = figures["replay_us"]["median"] - figures["kernels_us"]["median"]
        found.append(launch_us / MOST_LAUNCH_US)
    return max(found)


def add_option(parser: ArgumentParser) -> None:
    """Add --clocks, the argument ``asked`` of `quietest`."""
    parser.add_argument("--clocks", default="", help="groups of clocks to sample, such as kernels,call (default: all)")


def quietest(groups: Mapping[str, Callable[[], Samples]], asked: str = "") -> dict[str, Any]:
    """Return the spreads of all clocks, and as "noisy" the groups that were noisy in each of `TRIES` tries.

    The clocks of a group are sampled together, again until they are quiet. The quietest try counts. ``asked`` names
    the groups to sample, with commas between them; all where it is empty.
    """
    figures: dict[str, Any] = {}
    noisy = []
    for name in asked.split(",") if asked else groups:
        sample = groups[name]
        tries: list[dict[str, dict[str, float]]] = []
        while len(tries) < TRIES and not (tries and unrest(tries[-1]) <= 1):
            tries.append({clock: spread(times) for clock, times in sample().items()})
        best = min(tries, key=unrest)
        figures |= best
        if unrest(best) > 1:
            noisy.append(name)
    return {**figures, "noisy": noisy}
