"""Time and memory of a training step: eager, torch.compile's whole step in one CUDA graph, and plans of each level.

Usage: python -m bench.training [--markdown] [--autocast bf16] [MODEL ...], a model being NETWORK_batch_N of
bench.models.cifar_training. --autocast measures them under torch.autocast instead, as NETWORK_batch_N_bf16. The
processes prepare side by side and measure alone (bench/running.py). Writes training.json (training_bf16.json) in
bench/results/gpu, or --output; --markdown prints its tables. --add measures only what the file lacks of this commit.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.peers_table import Figures, cell, fastest, geometric_mean, microseconds
from bench.running import Table
from bench.tables import header, mib, number, row
from bench.turns import Job

LEVELS = ("O0", "O1", "O2")
MODES = ("O2", "O1", "O0", "compile", "eager")
"""Of bench.training_peer, which is not imported here: it brings in PyTorch. The slowest come first."""
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
    *("memory: ours / eager's", "ours / compile's"),
)
CALLS = 1
"""The place of "compile's call / ours"."""
_SUM = ("arena_nbytes", "state_nbytes", "weights_nbytes")
"""The memory that a plan declares."""


def models(*batches: int) -> tuple[str, ...]:
    """The names of `NETWORKS` at these batch sizes."""
    return tuple(f"{network}_batch_{batch}" for batch in batches for network in NETWORKS)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=540)
    made.add_argument("--autocast", choices=["bf16"], help="dtype of autocast, in all modes")
    made.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The path of the results."""
    return options.output or FOLDER / ("training_bf16.json" if options.autocast else "training.json")


def table(options: argparse.Namespace) -> Table:
    """The jobs by model."""
    path = results_path(options)

    def jobs(model: str) -> tuple[Job, ...]:
        command = (sys.executable, "-m", "bench.training_peer")
        return tuple(
            Job(
                table=str(path),
                model=model,
                mode=mode,
                command=(*command, mode, model, "--turns"),
                limit_s=options.limit,
            )
            for mode in options.modes.split(",")
            if model != WIDEST or mode in _OF_WIDEST
        )

    suffix = f"_{options.autocast}" if options.autocast else ""
    return Table(path=path, jobs=tuple(jobs(f"{model}{suffix}") for model in options.models or _models(options)))


def _models(options: argparse.Namespace) -> tuple[str, ...]:
    """The default models; under autocast without `WIDEST`."""
    return models(*BATCHES) if options.autocast else (*models(BATCHES[0]), WIDEST, *models(*BATCHES[1:]))


def ratios(figures: Figures) -> list[float | None]:
    """The columns `_RATIOS`; our memory is that of the level with the fastest call."""
    best = fastest(figures, LEVELS, "call_us")
    ours = sum(figures[best].get(name, 0) for name in _SUM) if best else None
    return [
        *(_over(figures, mode, "call_us", best, "call_us") for mode in ("eager", "compile")),
        _over(figures, "compile", "kernels_us", fastest(figures, LEVELS, "kernels_us"), "kernels_us"),
        *(_over(figures, level, "chain_us", level, "kernels_us") for level in LEVELS),
        *(_part(ours, figures.get(mode, {}).get("peak_allocated_nbytes")) for mode in ("eager", "compile")),
    ]


def _over(figures: Figures, theirs: str, clock: str, ours: str | None, other: str) -> float | None:
    if ours is None or clock not in figures.get(theirs, {}) or other not in figures.get(ours, {}):
        return None
    return microseconds(figures, theirs, clock) / microseconds(figures, ours, other)


def _part(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def means(models: dict[str, Figures]) -> Iterator[tuple[str, list[float | None]]]:
    """The geometric means of `ratios` over `NETWORKS`, by batch size and dtype, where all of them were measured."""
    ends = dict.fromkeys(found[0] for model in models if (found := re.search(r"_batch_\d+(_bf16)?$", model)))
    for end in ends:
        rows = [ratios(models[network + end]) for network in NETWORKS if network + end in models]
        if len(rows) == len(NETWORKS):
            columns = zip(*rows, strict=True)
            yield end.removeprefix("_"), [None if None in column else geometric_mean(column) for column in columns]


def nothing_won(models: dict[str, Figures]) -> dict[str, int | None]:
    """The smallest measured batch at which a plan's call is no faster than compile's, by network and dtype."""
    found: dict[str, int | None] = {}
    for batch, model in sorted((_batch(model), model) for model in models):
        name = re.sub(r"_batch_\d+", "", model)
        if (won := ratios(models[model])[1]) is not None and found.setdefault(name, None) is None and won <= 1:
            found[name] = batch
    return found


def _batch(model: str) -> int:
    """The batch size in a name."""
    found = re.search(r"_batch_(\d+)", model)
    assert found is not None, model
    return int(found[1])


def markdown(results: dict[str, Any]) -> str:
    """Tables of times, ratios and memory, a line for each model; microseconds and MiB."""
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
    below = "Memory of a plan: arena + state + weights / by the driver."
    below += f" From this batch nothing is won: {lost}." if lost else ""
    return "\n\n".join((*tables, below, environment.provenance(results)))


def _numbers(values: list[float | None]) -> list[str]:
    return [number(value, 2) for value in values]


def _lines(head: list[str], rows: list[list[str]]) -> str:
    """A table, without columns that have no figure."""
    columns = [column for column in zip(head, *rows, strict=True) if set(column[1:]) - {"-", "- / -"}]
    head, *rows = (list(line) for line in zip(*columns, strict=True))
    return "\n".join((*header(head), *map(row, rows)))


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


def main(arguments: list[str]) -> None:
    """Measure, or show the results."""
    options = parser().parse_args(arguments)
    running.measure_or_show(table(options), options, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
