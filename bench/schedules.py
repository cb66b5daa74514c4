"""The gain of the schedule: the framework's own kernels in one chain, and as scheduled by `auto`.

Usage: python -m bench.schedules [--markdown] [--level N] [MODEL ...], a model being package.module:callable. The
processes prepare side by side and measure alone (bench/running.py): a plan, its kernels in one chain, and eager in a
CUDA graph of torch's. Writes schedules.json (schedules-ON.json at another level than 0) in bench/results/gpu, or
--output; --markdown prints its table. --add measures only what the file lacks of this commit.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.peers_table import Figures, cell, geometric_mean, level_name, levels, microseconds
from bench.running import Table, short
from bench.tables import MISSING, header, mib, number, row
from bench.turns import Job

PAPER = ("inception_v3:{}", "nasnet_a_mobile:{}", "nasnet_a_large:{}", "darts:{}", "amoebanet_a:{}_as_in_nimble")
"""The networks for which Nimble (Kwon et al., 2020) reports the gain of multiple streams."""
MODELS = (
    *(f"bench.models.{name.format(precision)}" for precision in ("fp32", "fp16") for name in PAPER),
    "bench.models.googlenet:fp16",
    "bench.models.two_towers:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.resnet50:fp32",
)
_HEAD = (
    "model",
    "multiply-adds, 10^9",
    "degree of concurrency",
    "torch's graph of eager, us",
    "chain, us",
    "auto, us",
    "gain",
    "policy",
    "streams / syncs",
    "arena / bound / torch's pool, MiB",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=300)
    made.add_argument("--level", type=int, default=0)
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The path of the results."""
    return options.output or FOLDER / (f"schedules-O{options.level}.json" if options.level else "schedules.json")


def table(options: argparse.Namespace) -> Table:
    """The jobs by model."""
    path = results_path(options)

    def jobs(spec: str) -> tuple[Job, ...]:
        commands = {
            level_name(options.level): ("bench.nimblec_peer", str(options.level), spec, "--chain"),
            "graph": ("bench.torch_peer", "graph", spec),
        }
        fp32 = ["--fp32"] if spec.endswith(":fp32") else []
        return tuple(
            Job(
                table=str(path),
                model=spec,
                mode=mode,
                command=(sys.executable, "-m", *command, *fp32, "--turns"),
                limit_s=options.limit,
            )
            for mode, command in commands.items()
        )

    return Table(path=path, jobs=tuple(jobs(spec) for spec in options.models or MODELS))


def gain(figures: Figures) -> float | None:
    """The chain's GPU time over that of the chosen schedule; None if it was not measured."""
    (level,) = levels(figures) or [""]
    if "kernels_us" not in figures.get(level, {}):
        return None
    return microseconds(figures, level, "chain_us") / microseconds(figures, level, "kernels_us")


def markdown(results: dict[str, Any]) -> str:
    """A line for each model; the degree of logical concurrency is the size of the largest antichain."""
    lines = header(_HEAD)
    gains = []
    for spec, figures in results["models"].items():
        (level,) = levels(figures) or [""]
        ours, torch = figures.get(level, {}), figures.get("graph", {})
        gains.append(gain(figures))
        sizes = (
            ours.get("arena_nbytes"),
            ours.get("arena_lower_bound_nbytes"),
            torch.get("graph_pool_nbytes"),
        )
        macs = torch.get("multiply_adds")
        cells = [
            short(spec),
            number(macs and macs / 1e9, 2),
            str(ours.get("antichain", MISSING)),
            cell(figures, "graph", "kernels_us"),
            cell(figures, level, "chain_us"),
            cell(figures, level, "kernels_us"),
            number(gains[-1], 2),
            ours.get("policy", MISSING),
            f"{ours.get('streams', MISSING)} / {ours.get('syncs', MISSING)}",
            " / ".join(map(mib, sizes)),
        ]
        lines.append(row(cells))
    mean = ["geometric mean", *[""] * 5, number(geometric_mean(gains), 2), "", "", ""]
    return "\n".join([*lines, row(mean), "", environment.provenance(results)])


def main(arguments: list[str]) -> None:
    """Measure, or show the results."""
    options = parser().parse_args(arguments)
    running.measure_or_show(table(options), options, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
