"""The gain of the schedule: the framework's own kernels in one chain, and as scheduled by `auto`.

Usage: python -m bench.schedules [--markdown] [--level N] [MODEL ...], a model being package.module:callable. The
processes prepare side by side and measure alone (bench/running.py): a plan, its kernels in one chain, and eager in a
CUDA graph of torch's. Writes schedules.json (schedules-ON.json at another level than 0) in bench/results/gpu, or
--output; --markdown prints its table. --add measures only what the file lacks of this commit.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import environment, running
from bench.peers_table import Figures, cell, geometric_mean, level_name, levels, microseconds
from bench.running import Table, short
from bench.tables import MISSING, by_columns, mib, number, row

PAPER = ("inception_v3:{}", "nasnet_a_mobile:{}", "nasnet_a_large:{}", "darts:{}", "amoebanet_a:{}_as_in_nimble")
"""The networks for which Nimble (Kwon et al., 2020) reports the gain of multiple streams."""
MODELS = (
    *(f"bench.models.{name.format(precision)}" for precision in ("fp32", "fp16") for name in PAPER),
    "bench.models.googlenet:fp16",
    "bench.models.two_towers:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.resnet50:fp32",
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=300)
    made.add_argument("--level", type=int, default=0)
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model."""
    programs = {}
    for spec in options.models or MODELS:
        fp32 = ["--fp32"] if spec.endswith(":fp32") else []
        programs[spec] = {
            level_name(options.level): ("bench.nimblec_peer", str(options.level), spec, "--chain", *fp32),
            "graph": ("bench.torch_peer", "graph", spec, *fp32),
        }
    name = f"schedules-O{options.level}.json" if options.level else "schedules.json"
    return running.table(name, programs, options)


def gain(figures: Figures) -> float | None:
    """Return the chain's GPU time over that of the chosen schedule; None if it was not measured."""
    level = _level(figures)
    if "kernels_us" not in figures.get(level, {}):
        return None
    return microseconds(figures, level, "chain_us") / microseconds(figures, level, "kernels_us")


def _level(figures: Figures) -> str:
    (level,) = levels(figures) or [""]
    return level


def _ours(figures: Figures, name: str) -> Any:
    return figures.get(_level(figures), {}).get(name)


def _torch(figures: Figures, name: str) -> Any:
    return figures.get("graph", {}).get(name)


def _either(value: object) -> str:
    return MISSING if value is None else str(value)


COLUMNS: dict[str, Callable[[str, Figures], str]] = {
    "model": lambda spec, _: short(spec),
    "multiply-adds, 10^9": lambda _, f: number((macs := _torch(f, "multiply_adds")) and macs / 1e9, 2),
    "degree of concurrency": lambda _, f: _either(_ours(f, "antichain")),
    "torch's graph of eager, us": lambda _, f: cell(f, "graph", "kernels_us"),
    "chain, us": lambda _, f: cell(f, _level(f), "chain_us"),
    "auto, us": lambda _, f: cell(f, _level(f), "kernels_us"),
    "gain": lambda _, f: number(gain(f), 2),
    "policy": lambda _, f: _either(_ours(f, "policy")),
    "streams / syncs": lambda _, f: f"{_either(_ours(f, 'streams'))} / {_either(_ours(f, 'syncs'))}",
    "arena / bound / torch's pool, MiB": lambda _, f: " / ".join(
        map(mib, (_ours(f, "arena_nbytes"), _ours(f, "arena_lower_bound_nbytes"), _torch(f, "graph_pool_nbytes")))
    ),
}
"""The degree of concurrency is the size of the largest antichain."""


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model, and the geometric mean of the gains."""
    models = results["models"]
    mean = geometric_mean(gain(figures) for figures in models.values())
    below = row(["geometric mean", *[""] * 5, number(mean, 2), "", "", ""])
    return "\n".join([*by_columns(COLUMNS, models.items()), below, "", environment.provenance(results)])


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
