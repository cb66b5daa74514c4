"""The table of `bench.peers`, which compares clocks of torch_peer.py with the same of nimblec_peer.py."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from bench import environment
from bench.running import short
from bench.tables import MISSING, by_columns, number, row

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The figures of one model, by mode."""

TORCH_MODES = ("eager", "graph", "compile", "freeze", "autotune", "aoti")
COMPILED_MODES = ("compile", "freeze", "autotune")
"""Modes of torch.compile, whose time is that of the fastest."""

_NOISY = "~"
_GROUPS = {"replay_us": "kernels", "busy_us": "kernels"}
"""The group of a clock, unless it is called like its clock: a group is sampled together (`bench.clocks.quietest`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A column: the fastest of torch's modes by one clock, and the fastest of our levels by another."""

    title: str
    modes: tuple[str, ...]
    theirs: str
    ours: str


COMPARISONS = (
    Comparison(title="kernels", modes=COMPILED_MODES, theirs="kernels_us", ours="kernels_us"),
    Comparison(title="call / our replay", modes=COMPILED_MODES, theirs="call_us", ours="replay_us"),
    Comparison(title="call", modes=COMPILED_MODES, theirs="call_us", ours="call_us"),
    Comparison(title="call from numpy", modes=COMPILED_MODES, theirs="numpy_us", ours="numpy_us"),
    Comparison(title="eager's call / our replay", modes=("eager",), theirs="call_us", ours="replay_us"),
)
TUNED = Comparison(title="max-autotune: kernels", modes=("autotune",), theirs="kernels_us", ours="kernels_us")


def level_name(level: int) -> str:
    """Return the name of nimblec's mode of a level."""
    return f"-O{level}"


def microseconds(figures: Figures, mode: str, clock: str) -> float:
    """Return the median of a mode by a clock; infinite if it was not measured."""
    found = figures.get(mode, {}).get(clock)
    return float(found["median"]) if found else math.inf


def levels(figures: Iterable[str]) -> list[str]:
    """Return the modes that are levels of nimblec."""
    return sorted(mode for mode in figures if mode.startswith("-O"))


def fastest(figures: Figures, modes: Iterable[str], clock: str) -> str | None:
    """Return the fastest mode by a clock; None if none was measured."""
    mode = min(modes, key=lambda m: microseconds(figures, m, clock), default=None)
    return mode if mode is not None and math.isfinite(microseconds(figures, mode, clock)) else None


def ratio(figures: Figures, comparison: Comparison) -> float | None:
    """Return torch's time over ours; None if either is missing."""
    theirs = fastest(figures, comparison.modes, comparison.theirs)
    ours = fastest(figures, levels(figures), comparison.ours)
    if theirs is None or ours is None:
        return None
    return microseconds(figures, theirs, comparison.theirs) / microseconds(figures, ours, comparison.ours)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there are none."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model, those of one network by batch size, the geometric means, and the provenance.

    Columns without a figure are left out.
    """
    models = {spec: figures for curve in by_batch(results).values() for spec, figures in curve.values()}
    shown = [c for c in (*COMPARISONS, TUNED) if any(ratio(figures, c) for figures in models.values())]
    columns: dict[str, Callable[[str, Figures], str]] = {"model": lambda spec, _: short(spec)}
    columns |= {f"{c.title}: torch / ours, us": partial(pair, c) for c in shown}
    columns |= {"launches: torch / ours": launches, "error: eager / torch / ours": errors}
    there = {spec: figures for spec, figures in models.items() if any(ratio(figures, c) for c in shown)}
    means = [number(geometric_mean(ratio(figures, c) for figures in models.values()), 2) for c in shown]
    below = [environment.provenance(results), f"**Bold**: torch is ahead. {_NOISY}: not quiet in three tries."]
    if missing := [short(spec) for spec in models if spec not in there]:
        below.append(f"Not measured on both sides: {', '.join(missing)}.")
    lines = [*by_columns(columns, there.items()), row(["geometric mean", *means, "", ""])]
    return "\n".join([*lines, "", " ".join(below)])


def by_batch(results: Mapping[str, Any]) -> dict[str, dict[int, tuple[str, Figures]]]:
    """Return the figures of each network by batch size (_batch_N in the model's name, or 1), with the model's name."""
    found: dict[str, dict[int, tuple[str, Figures]]] = {}
    for spec, figures in results["models"].items():
        size = re.search(r"_batch_(\d+)$", spec)
        curve = found.setdefault(spec[: size.start()] if size else spec, {})
        curve[int(size[1]) if size else 1] = spec, figures
    return {spec: dict(sorted(curve.items())) for spec, curve in found.items()}


def cell(figures: Figures, mode: str | None, clock: str, digits: int = 0) -> str:
    """Return a median in microseconds, marked where the machine was not quiet."""
    if mode is None or math.isinf(microseconds(figures, mode, clock)):
        return MISSING
    group = _GROUPS.get(clock, clock.removesuffix("_us"))
    noisy = _NOISY if group in figures[mode].get("noisy", ()) else ""
    return noisy + number(microseconds(figures, mode, clock), digits)


def pair(comparison: Comparison, _: str, figures: Figures) -> str:
    """Return torch's time, ours, and their ratio, bold where torch is ahead."""
    theirs = cell(figures, fastest(figures, comparison.modes, comparison.theirs), comparison.theirs)
    ours = cell(figures, fastest(figures, levels(figures), comparison.ours), comparison.ours)
    found = ratio(figures, comparison)
    times = number(found, 2) if found is None or found >= 1 else f"**{number(found, 2)}**"
    return f"{theirs} / {ours} ({times})"


def _with_fastest_kernels(figures: Figures) -> tuple[str | None, str | None]:
    return fastest(figures, COMPILED_MODES, "kernels_us"), fastest(figures, levels(figures), "kernels_us")


def launches(_: str, figures: Figures) -> str:
    """Return the kernels of torch.compile's fastest mode and of our fastest level."""
    best = _with_fastest_kernels(figures)
    return " / ".join(str(figures[mode].get("kernels", MISSING)) if mode else MISSING for mode in best)


def errors(_: str, figures: Figures) -> str:
    """Return the errors of eager, of torch.compile's fastest mode and of our fastest level."""
    modes = ("eager", *_with_fastest_kernels(figures))
    found = [figures.get(mode, {}).get("error") if mode else None for mode in modes]
    return " / ".join(MISSING if error is None else f"{error:.1e}" for error in found)
