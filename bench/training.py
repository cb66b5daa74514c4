"""Time and memory of a training step: eager, torch.compile's whole step in one CUDA graph, and plans of each level.

Usage: python -m bench.training [--markdown] [--autocast bf16] [MODEL ...], a model being NETWORK_batch_N of
bench.models.training_networks. --autocast measures them under torch.autocast instead, as NETWORK_batch_N_bf16. The
processes prepare side by side and measure alone (bench/running.py). Writes training.json (training_bf16.json) in
bench/results/gpu, or --output; --markdown prints its tables. --add measures only what the file lacks of this commit.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench import environment, running
from bench.peers_table import Figures, cell, fastest, geometric_mean, microseconds
from bench.running import Table
from bench.tables import mib, number
from bench.tables import table as lines_of

LEVELS = ("O0", "O1", "O2")
MODES = ("O2", "O1", "O0", "compile", "eager")
"""The modes of bench.training_peer, which is not imported here as it imports PyTorch. The slowest come first."""
NETWORKS = ("efficientnet_b0", "resnet50", "mobilenet_v2")
BATCHES = (32, 128, 8, 2)
"""The paper's comes first; there is no batch of 1, whose single pixel batch norms refuse."""
WIDEST = "nasnet_a_mobile_batch_32"
"""The network with the most parallelism in the paper: its schedule and its memory are measured."""
_OF_WIDEST = ("O0", "compile", "eager")
_CLOCKS = (
    *(("eager", "call_us"), ("compile", "call_us"), ("compile", "kernels_us")),
    *((level, clock) for level in LEVELS for clock in ("call_us", "replay_us", "kernels_us", "chain_us")),
)
_RATIOS = (
    *("eager's call / ours", "compile's call / ours", "compile's kernels / ours"),
    *(f"-{level}: chain / kernels" for level in LEVELS),
    *("memory: ours / eager's", "ours / compile's", "on one stream / compile's"),
)
CALLS = 1
"""The place of "compile's call / ours"."""
_SUM = ("arena_nbytes", "state_nbytes", "weights_nbytes")
"""The memory that a plan declares."""


def models(*batches: int) -> tuple[str, ...]:
    """Return the names of `NETWORKS` at these batch sizes."""
    return tuple(f"{network}_batch_{batch}" for batch in batches for network in NETWORKS)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=540)
    made.add_argument("--autocast", choices=["bf16"], help="dtype of autocast, in all modes")
    made.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model; by default all networks at all batch sizes, and `WIDEST` without autocast."""
    suffix = f"_{options.autocast}" if options.autocast else ""
    default = models(*BATCHES) if options.autocast else (*models(BATCHES[0]), WIDEST, *models(*BATCHES[1:]))
    programs = {
        f"{model}{suffix}": {
            mode: ("bench.training_peer", mode, f"{model}{suffix}")
            for mode in options.modes.split(",")
            if model != WIDEST or mode in _OF_WIDEST
        }
        for model in options.models or default
    }
    return running.table("training_bf16.json" if options.autocast else "training.json", programs, options)


def ratios(figures: Figures) -> list[float | None]:
    """Return the columns `_RATIOS`; our memory is that of the level with the fastest call."""
    best = fastest(figures, LEVELS, "call_us")
    found = figures[best] if best else {}
    ours = sum(found.get(name, 0) for name in _SUM)
    alone = ours - found["arena_nbytes"] + found["chain_arena_nbytes"] if "chain_arena_nbytes" in found else None
    return [
        *(_over(figures, mode, "call_us", best, "call_us") for mode in ("eager", "compile")),
        _over(figures, "compile", "kernels_us", fastest(figures, LEVELS, "kernels_us"), "kernels_us"),
        *(_over(figures, level, "chain_us", level, "kernels_us") for level in LEVELS),
        *(_part(ours, figures.get(mode, {}).get("peak_allocated_nbytes")) for mode in ("eager", "compile")),
        _part(alone, figures.get("compile", {}).get("peak_allocated_nbytes")),
    ]


def _over(figures: Figures, theirs: str, clock: str, ours: str | None, other: str) -> float | None:
    if ours is None or clock not in figures.get(theirs, {}) or other not in figures.get(ours, {}):
        return None
    return microseconds(figures, theirs, clock) / microseconds(figures, ours, other)


def _part(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def means(models: dict[str, Figures]) -> Iterator[tuple[str, list[float | None]]]:
    """Yield the geometric means of `ratios` over `NETWORKS`, by batch size and dtype where all were measured."""
    ends = dict.fromkeys(found[0] for model in models if (found := re.search(r"_batch_\d+(_bf16)?$", model)))
    for end in ends:
        rows = [ratios(models[network + end]) for network in NETWORKS if network + end in models]
        if len(rows) == len(NETWORKS):
            columns = zip(*rows, strict=True)
            yield end.removeprefix("_"), [None if None in column else geometric_mean(column) for column in columns]


def nothing_won(models: dict[str, Figures]) -> dict[str, int | None]:
    """Return the smallest measured batch at which a plan's call is no faster than compile's, by network and dtype."""
    found: dict[str, int | None] = {}
    names = {model: re.split(r"_batch_(\d+)", model) for model in models}
    for model, (network, batch, dtype) in sorted(names.items(), key=lambda item: (int(item[1][1]), item[0])):
        if (won := ratios(models[model])[1]) is not None:
            kept = found.setdefault(network + dtype, None)
            found[network + dtype] = int(batch) if kept is None and won <= 1 else kept
    return found


def markdown(results: dict[str, Any]) -> str:
    """Return tables of times, ratios and memory, a line for each model; microseconds and MiB."""
    models: dict[str, Figures] = results["models"]
    times = [[model, *(cell(figures, *clock) for clock in _CLOCKS)] for model, figures in models.items()]
    shares = [[model, *_numbers(ratios(figures))] for model, figures in models.items()]
    shares += [[f"geometric mean, {end}", *_numbers(mean)] for end, mean in means(models)]
    tables = (
        _lines(["model", *(" ".join(clock) for clock in _CLOCKS)], times),
        _lines(["model", *_RATIOS], shares),
        _lines(["model", "eager: allocated / reserved", "compile", "compile: graph", *LEVELS], _memory(models)),
    )
    lost = ", ".join(f"{name} {batch or 'never'}" for name, batch in nothing_won(models).items())
    below = "Memory of a plan: arena + state + weights / as the driver counts it."
    below += f" Smallest measured batch at which a plan is no faster than torch.compile: {lost}." if lost else ""
    return "\n\n".join((*tables, below, environment.provenance(results)))


def _numbers(values: list[float | None]) -> list[str]:
    return [number(value, 2) for value in values]


def _lines(head: list[str], rows: list[list[str]]) -> str:
    """Return a table without the columns that have no figure."""
    columns = [column for column in zip(head, *rows, strict=True) if set(column[1:]) - {"-", "- / -"}]
    head, *rows = (list(line) for line in zip(*columns, strict=True))
    return "\n".join(lines_of(head, rows))


def _memory(models: dict[str, Figures]) -> list[list[str]]:
    def cells(figures: Figures) -> Iterator[str]:
        for mode in ("eager", "compile"):
            found = figures.get(mode, {})
            yield " / ".join(mib(found.get(f"peak_{how}_nbytes")) for how in ("allocated", "reserved"))
        yield mib(figures.get("compile", {}).get("graph_reserved_nbytes"))
        for level in LEVELS:
            found = figures.get(level, {})
            needed = sum(found[name] for name in _SUM) if "arena_nbytes" in found else None
            yield f"{mib(needed)} / {mib(found.get('driver_nbytes'))}"

    return [[model, *cells(figures)] for model, figures in models.items()]


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
