"""Sixty networks that nobody tuned for: torch.compile with freezing beside -O2, batch 1, half precision.

Usage: python -m bench.zoo [--part K/N] [--limit-s S] [NAME ...] | --markdown. Networks are those of bench/models/zoo.py
(drawn by a seed); a part K/N is each N-th from the K-th. Processes prepare side by side on all GPUs and measure alone
(bench/running.py). Rows are added to bench/results/gpu/zoo.json, or --output: first networks without a row, then rows
of other commits. --markdown prints ratios, their histogram, and where the time of the ten lowest goes. Kernels are
those of one CUDA graph, of torch.compile's kernels and of ours; calls are synchronised calls on tensors on the GPU.
"-O2, s" is a whole compilation, beside others.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from bench import environment, peers_table, running
from bench.peers_table import COMPARISONS, Figures, geometric_mean, level_name, ratio
from bench.running import Table
from bench.tables import MISSING, by_columns, number

MODELS = "bench.models.zoo"
OURS = level_name(2)
KERNELS, CALLS = (next(c for c in COMPARISONS if c.title == title) for title in ("kernels", "call"))
ENOUGH = 1.3
WORST = 10
"""Networks whose kernels are listed."""
_LISTED = 6
"""Kernels of each."""
_TB_PER_S = 4.8
"""Memory of an H200."""
_TFLOPS = 800
"""Half-precision products of an H200, as measured with large ones."""
_LAUNCH_US = 0.73
"""A programmatic edge between two kernels of a graph, measured on an H200."""
_STEPS = (0.0, 1.0, ENOUGH, 1.6, 2.0, 2.5, 3.0, 4.0, float("inf"))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "NAME", limit_s=300)
    made.add_argument("--part", default="1/1", metavar="K/N")
    made.add_argument("--limit-s", dest="stop_after", type=float, help="seconds after which everything ends")
    made.set_defaults(add=True, gpus=_gpu_count(), jobs=4)
    return made


def _gpu_count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",") if visible else environment.describe()["gpu"].splitlines())


def names(options: argparse.Namespace) -> Sequence[str]:
    """Return the networks that a command line asks for."""
    if options.models:
        return options.models
    from bench.models.zoo import NAMES

    first, count = map(int, options.part.split("/"))
    return [*NAMES][first - 1 :: count]


def table(options: argparse.Namespace) -> Table:
    """Return the two jobs of each network."""
    clocks = ("--clocks", "kernels,call")
    programs = {}
    for spec in (f"{MODELS}:{name}" for name in names(options)):
        programs[spec] = {
            "freeze": ("bench.torch_peer", "freeze", spec, *clocks),
            OURS: ("bench.nimblec_peer", "2", spec, *clocks),
        }
    return running.table("zoo.json", programs, options)


COLUMNS: dict[str, Callable[[str, Figures], str]] = {
    "network": lambda spec, _: _name(spec),
    "kernels: torch / ours, us": partial(peers_table.pair, KERNELS),
    "call: torch / ours, us": partial(peers_table.pair, CALLS),
    "launches: torch / ours": peers_table.launches,
    "-O2, s": lambda _, figures: number(figures.get(OURS, {}).get("prepare_s"), 0),
    "error: torch / ours": peers_table.errors,
}


def markdown(results: dict[str, Any]) -> str:
    """Return the table, its summary and histogram, and where the time of the lowest goes."""
    models: dict[str, Figures] = results["models"]
    found = {spec: value for spec, figures in models.items() if (value := ratio(figures, KERNELS)) is not None}
    ranked = sorted(found, key=found.__getitem__)
    lines = by_columns(COLUMNS, [(spec, models[spec]) for spec in ranked])
    lines += ["", *_summary(results, found), "", "```text", *histogram(found.values()), "```"]
    for spec in ranked[:WORST]:
        lines += ["", *where_time_goes(spec, models[spec])]
    return "\n".join(lines)


def _summary(results: dict[str, Any], found: dict[str, float]) -> Iterator[str]:
    models: dict[str, Figures] = results["models"]
    yield f"{len(found)} networks, torch.compile's kernels over ours: {summary([*found.values()])}."
    yield f"Calls: {summary([each for spec in found if (each := ratio(models[spec], CALLS))])}."
    failed = (
        f"{_name(spec)} {mode}: {' '.join(row['failed'].split())[:160]}"
        for spec, figures in models.items()
        for mode, row in figures.items()
        if "failed" in row
    )
    yield from (f"Failed: {each}." for each in failed)
    yield environment.provenance(results)


def summary(ratios: Sequence[float]) -> str:
    """Return geometric mean, lowest, and the share that reach `ENOUGH`."""
    if not ratios:
        return MISSING
    share = sum(each >= ENOUGH for each in ratios) / len(ratios)
    mean = number(geometric_mean(ratios), 2)
    return f"geometric mean {mean}, lowest {min(ratios):.2f}, {share:.0%} at least {ENOUGH}"


def histogram(ratios: Iterable[float]) -> Iterator[str]:
    """Yield a bar for each range of ratios."""
    counts = Counter(sum(step <= each for step in _STEPS[1:]) for each in ratios)
    for index, low in enumerate(_STEPS[:-1]):
        high = _STEPS[index + 1]
        yield f"{low:.1f} to {high:<4.1f} {'#' * counts[index]} {counts[index]}"


def where_time_goes(spec: str, figures: Figures) -> Iterator[str]:
    """Yield a network's time against its bytes, products and launches, and its kernels with the most time to lose.

    A kernel's bytes are those that its launches read and write, each alone.
    """
    ours = figures[OURS]
    work: dict[str, dict[str, float]] = ours["work"]
    total = ours["kernels_us"]["median"]
    floors = {
        "weights": ours["weights_nbytes"] / _TB_PER_S / 1e6,
        "products": 2 * figures["freeze"].get("multiply_adds", 0) / _TFLOPS / 1e6,
        "launches": ours["kernels"] * _LAUNCH_US,
    }
    least = ", ".join(f"{name} {value:.0f}" for name, value in floors.items())
    yield f"**{_name(spec)}** ({number(ratio(figures, KERNELS), 2)}): {total:.0f} us; alone {least} us."
    yield from (f"{note}." for note in ours.get("notes", ()) if note.startswith("tried"))
    yield ""

    def lost(row: dict[str, float]) -> float:
        return row["gpu_us"] - max(_bytes_us(row), row["count"] * _LAUNCH_US)

    ranked = sorted(work.items(), key=lambda item: -lost(item[1]))[:_LISTED]
    yield from by_columns(
        {
            "kernel": lambda name, _: name[:90],
            "launches": lambda _, row: str(row["count"]),
            "us": lambda _, row: number(row["gpu_us"], 1),
            "its bytes, us": lambda _, row: number(_bytes_us(row), 1),
            "its launches, us": lambda _, row: number(row["count"] * _LAUNCH_US, 1),
            "above both, us": lambda _, row: number(lost(row), 1),
        },
        ranked,
    )


def _bytes_us(row: dict[str, float]) -> float:
    return row["mbytes"] / _TB_PER_S


def _name(spec: str) -> str:
    return spec.removeprefix(f"{MODELS}:")


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
