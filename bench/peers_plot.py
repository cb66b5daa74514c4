"""Plots of the results of `bench.peers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

# The SVG backend needs no display.
mpl.use("svg")
from matplotlib import pyplot as plt

from bench.peers_table import COMPARISONS, COMPILED_MODES, Figures, by_batch, fastest, levels, microseconds, ratio


def draw(results: Mapping[str, Any], path: Path, *, batches: bool) -> None:
    """Write a plot as SVG: bars of speedups, or curves over the batch size."""
    with mpl.rc_context({"svg.hashsalt": "nimblec", "svg.fonttype": "none"}):
        figure = _curves(by_batch(results)) if batches else _bars(results["models"])
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


def _bars(models: Mapping[str, Figures]) -> Any:
    """Plot torch.compile's best time over ours, for each model: the kernels alone, and a call from arrays."""
    names = [spec.rpartition(".")[2] for spec in models]
    figure, axes = plt.subplots(2, 1, figsize=(max(6.0, 0.7 * len(names)), 6.0), sharex=True)
    shown = [comparison for comparison in COMPARISONS if comparison.title in {"kernels", "call from numpy"}]
    for axis, comparison in zip(axes, shown, strict=True):
        heights = [ratio(figures, comparison) or 0.0 for figures in models.values()]
        axis.bar_label(axis.bar(names, heights, color="tab:blue"), [f"{h:.1f}" if h else "" for h in heights])
        axis.margins(y=0.15)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(f"{comparison.title}:\ntorch.compile's best / nimblec")
    axes[-1].tick_params(axis="x", rotation=60)
    return figure


def _curves(networks: Mapping[str, Mapping[int, tuple[str, Figures]]]) -> Any:
    """Plot GPU time of the kernels per sample, over the batch size, in a panel for each network."""
    figure, axes = plt.subplots(1, len(networks), figsize=(3.2 * len(networks), 3.2), squeeze=False)
    clock = "kernels_us"
    for axis, (spec, curve) in zip(axes[0], networks.items(), strict=True):
        for label, best in (
            ("torch.compile's best", {size: fastest(f, COMPILED_MODES, clock) for size, (_, f) in curve.items()}),
            ("nimblec", {size: fastest(f, levels(f), clock) for size, (_, f) in curve.items()}),
        ):
            points = {size: microseconds(curve[size][1], mode, clock) / size for size, mode in best.items() if mode}
            axis.plot(list(points), list(points.values()), marker="o", label=label)
        axis.set(title=spec.rpartition(".")[2], xlabel="batch size", xscale="log")
        axis.set_xticks(list(curve), labels=[str(size) for size in curve])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("GPU time of the kernels / batch size, us")
    axes[0][0].legend()
    return figure
