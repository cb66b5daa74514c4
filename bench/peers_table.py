"""The table of `bench.peers`, which compares clocks of torch_peer.py with the same of nimblec_peer.py."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench import environment
from bench.running import short
from bench.tables import MISSING, header, number, row

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The figures of one model, by mode."""

TORCH_MODES = ("eager", "graph", "compile", "freeze", "autotune", "aoti")
COMPILED_MODES = ("compile", "freeze", "autotune")
"""Modes of torch.compile, whose time is that of the fastest."""

_NOISY = "~"
_GROUPS = {
    "kernels_us": "kernels",
    "replay_us": "kernels",
    "call_us": "call",
    "numpy_us": "numpy",
    "other_order_us": "other_order",
    "page_locked_us": "page_locked",
    "launch_us": "launch",
    "chain_us": "chain",
    "token_us": "token",
}
"""The group of each clock: its clocks are sampled together (`bench.clocks.quietest`)."""


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
    """The name of nimblec's mode of a level."""
    return f"-O{level}"


def microseconds(figures: Figures, mode: str, clock: str) -> float:
    """The median of a mode by a clock; infinite if it was not measured."""
    found = figures.get(mode, {}).get(clock)
    return float(found["median"]) if found else math.inf


def levels(figures: Iterable[str]) -> list[str]:
    """The modes that are levels of nimblec."""
    return sorted(mode for mode in figures if mode.startswith("-O"))


def fastest(figures: Figures, modes: Iterable[str], clock: str) -> str | None:
    """The fastest mode by a clock; None if none was measured."""
    mode = min(modes, key=lambda m: microseconds(figures, m, clock), default=None)
    return mode if mode is not None and math.isfinite(microseconds(figures, mode, clock)) else None


def ratio(figures: Figures, comparison: Comparison) -> float | None:
    """Torch's time over ours; None if either is missing."""
    theirs = fastest(figures, comparison.modes, comparison.theirs)
    ours = fastest(figures, levels(figures), comparison.ours)
    if theirs is None or ours is None:
        return None
    return microseconds(figures, theirs, comparison.theirs) / microseconds(figures, ours, comparison.ours)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None if there are none."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def markdown(results: dict[str, Any]) -> str:
    """A line for each model, those of one network by batch size, the geometric means, and the provenance.

    Columns without a figure are left out.
    """
    below = environment.provenance(results)
    models = {spec: figures for curve in by_batch(results).values() for spec, figures in curve.values()}
    shown = [c for c in (*COMPARISONS, TUNED) if any(ratio(figures, c) for figures in models.values())]
    head = ["model", *(f"{c.title}: torch / ours, us" for c in shown)]
    head += ["launches: torch / ours", "error: eager / torch / ours"]
    lines = header(head)
    missing = [short(spec) for spec, figures in models.items() if not any(ratio(figures, c) for c in shown)]
    for spec, figures in models.items():
        if short(spec) in missing:
            continue
        times = [_pair(figures, comparison) for comparison in shown]
        lines.append(row([short(spec), *times, _launches(figures), _errors(figures)]))
    means = [geometric_mean(ratio(figures, c) for figures in models.values()) for c in shown]
    lines.append(row(["geometric mean", *(f"{number(mean, 2)}" for mean in means), "", ""]))
    notes = [below, f"**Bold**: torch is ahead. {_NOISY}: not quiet in three tries."]
    notes += [f"Not measured on both sides: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, "", " ".join(notes)])


def by_batch(results: Mapping[str, Any]) -> dict[str, dict[int, tuple[str, Figures]]]:
    """The figures of each network by batch size (_batch_N in the model's name, or 1), with the model's name."""
    found: dict[str, dict[int, tuple[str, Figures]]] = {}
    for spec, figures in results["models"].items():
        size = re.search(r"_batch_(\d+)$", spec)
        curve = found.setdefault(spec[: size.start()] if size else spec, {})
        curve[int(size[1]) if size else 1] = spec, figures
    return {spec: dict(sorted(curve.items())) for spec, curve in found.items()}


def cell(figures: Figures, mode: str | None, clock: str, digits: int = 0) -> str:
    """A median in microseconds, marked where the machine was not quiet."""
    if mode is None or math.isinf(microseconds(figures, mode, clock)):
        return MISSING
    noisy = _NOISY if _GROUPS[clock] in figures[mode].get("noisy", ()) else ""
    return noisy + number(microseconds(figures, mode, clock), digits)


def _pair(figures: Figures, comparison: Comparison) -> str:
    theirs = cell(figures, fastest(figures, comparison.modes, comparison.theirs), comparison.theirs)
    ours = cell(figures, fastest(figures, levels(figures), comparison.ours), comparison.ours)
    found = ratio(figures, comparison)
    times = number(found, 2) if found is None or found >= 1 else f"**{number(found, 2)}**"
    return f"{theirs} / {ours} ({times})"


def _launches(figures: Figures) -> str:
    """The numbers of kernels of the modes with the fastest kernels."""
    best = fastest(figures, COMPILED_MODES, "kernels_us"), fastest(figures, levels(figures), "kernels_us")
    return " / ".join(str(figures[mode].get("kernels", MISSING)) if mode else MISSING for mode in best)


def _errors(figures: Figures) -> str:
    """The errors of eager, and of the modes with the fastest kernels of torch.compile and of ours."""
    best = fastest(figures, COMPILED_MODES, "kernels_us"), fastest(figures, levels(figures), "kernels_us")
    found = [figures.get(mode, {}).get("error") if mode else None for mode in ("eager", *best)]
    return " / ".join(MISSING if error is None else f"{error:.1e}" for error in found)
