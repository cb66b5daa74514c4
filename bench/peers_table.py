"""The tables of what `bench.peers` measured: wall and GPU microseconds, kernels, and ratios."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What was measured of one model, by mode."""

TORCH_MODES = ("eager", "graph", "compile", "freeze", "autotune", "aoti")
COMPILED_MODES = ("compile", "freeze", "autotune")
"""Torch's best is the fastest of these that was measured."""

_NOT_MEASURED = "-"


def level_name(level: int) -> str:
    """The mode that a level of nimblec is."""
    return f"-O{level}"


def microseconds(figures: Figures, mode: str, clock: str = "wall_us") -> float:
    """The median of a mode; infinite where it was not measured."""
    found = figures.get(mode, {}).get(clock)
    return float(found["median"]) if found else math.inf


def levels(figures: Iterable[str]) -> list[str]:
    """The modes that are levels of nimblec."""
    return sorted(mode for mode in figures if mode.startswith("-O"))


def fastest(figures: Figures, modes: Iterable[str]) -> str | None:
    """The mode of the lowest wall time."""
    mode = min(modes, key=lambda m: microseconds(figures, m), default=None)
    return mode if mode is not None and math.isfinite(microseconds(figures, mode)) else None


def ratio(figures: Figures, modes: Iterable[str], clock: str = "wall_us") -> float | None:
    """Time of the fastest of ``modes``, by the wall, over that of our fastest level; None where one is missing."""
    theirs, ours = fastest(figures, modes), fastest(figures, levels(figures))
    if theirs is None or ours is None:
        return None
    return microseconds(figures, theirs, clock) / microseconds(figures, ours, clock)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    logarithms = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def markdown(results: Mapping[str, Any]) -> str:
    """One line for each model, and the geometric means of the ratios."""
    models: Mapping[str, Figures] = results["models"]
    measured = {mode for figures in models.values() for mode in figures}
    modes = [mode for mode in TORCH_MODES if mode in measured] + levels(measured)
    rivals = {"torch.compile's best": COMPILED_MODES} if measured & set(COMPILED_MODES) else {}
    rivals["eager"] = ("eager",)
    first = next(iter(rivals))
    head = ["model", *(f"`{mode}`" if mode.startswith("-") else mode for mode in modes)]
    head += [f"GPU: {first} / ours", f"kernels: {first} / ours", *(f"{rival} / ours" for rival in rivals)]
    lines = [_row(head), "|---" * len(head) + "|"]
    lines += [_row([_short(spec), *_cells(figures, modes, list(rivals.values()))]) for spec, figures in models.items()]
    means = [geometric_mean(ratio(figures, theirs) for figures in models.values()) for theirs in rivals.values()]
    gpu, *walls = (
        f"**{_number(mean, 2)}**"
        for mean in (geometric_mean(ratio(f, rivals[first], "gpu_us") for f in models.values()), *means)
    )
    lines.append(_row(["geometric mean", *[""] * len(modes), gpu, "", *walls]))
    return "\n".join(lines)


def _cells(figures: Figures, modes: Iterable[str], rivals: Sequence[Sequence[str]]) -> list[str]:
    """All cells of a model's line but its name; GPU and kernels are of the first of ``rivals``, modes of torch."""
    best = fastest(figures, rivals[0]), fastest(figures, levels(figures))
    gpu = (_number(microseconds(figures, mode, "gpu_us"), 0) if mode else _NOT_MEASURED for mode in best)
    kernels = (str(figures[mode].get("kernels", _NOT_MEASURED)) if mode else _NOT_MEASURED for mode in best)
    return [
        *(_number(microseconds(figures, mode), 0) for mode in modes),
        " / ".join(gpu),
        " / ".join(kernels),
        *(_number(ratio(figures, theirs), 2) for theirs in rivals),
    ]


def batches(results: Mapping[str, Any]) -> str:
    """A line for each network: torch's best and ours, in wall microseconds, at each batch size."""
    found = by_batch(results)
    sizes = sorted({size for curve in found.values() for size in curve})
    lines = [_row(["model", *(f"batch {size}: torch's best / ours" for size in sizes)])]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for spec, curve in found.items():
        lines.append(_row([_short(spec), *(_pair(curve.get(size, {})) for size in sizes)]))
    return "\n".join(lines)


def by_batch(results: Mapping[str, Any]) -> dict[str, dict[int, Figures]]:
    """The figures of each network by batch size; its callables end in _batch_N, or it is 1."""
    found: dict[str, dict[int, Figures]] = {}
    for spec, figures in results["models"].items():
        size = re.search(r"_batch_(\d+)$", spec)
        curve = found.setdefault(spec[: size.start()] if size else spec, {})
        curve[int(size[1]) if size else 1] = figures
    return {spec: dict(sorted(curve.items())) for spec, curve in found.items()}


def _pair(figures: Figures) -> str:
    times = [fastest(figures, modes) for modes in (COMPILED_MODES, levels(figures))]
    shown = " / ".join(_number(microseconds(figures, mode), 0) if mode else _NOT_MEASURED for mode in times)
    return f"{shown} ({_number(ratio(figures, COMPILED_MODES), 2)})"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _short(spec: str) -> str:
    return spec.removeprefix("bench.models.")


def _number(value: float | None, digits: int) -> str:
    return _NOT_MEASURED if value is None or math.isinf(value) else f"{value:.{digits}f}"
