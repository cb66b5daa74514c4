"""Refits of all weights of a plan: their time compared with copies, their results with a fresh compilation.

Usage: python -m bench.refit [--markdown] [--level N] [MODEL=OTHER ...], OTHER being MODEL with other weights, both
package.module:callable. The processes prepare side by side and measure alone (bench/running.py). Writes refit.json in
bench/results/gpu, or --output; --markdown prints its table. --add measures only what the file lacks of this commit.

On one H200, `python -m bench.refit --jobs 2 --stop-after 570` compiles BERT-base and ResNet-50 twice each at -O2, which
is expected to take four to six minutes, and refits each of them about a hundred times.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import environment, running
from bench.peers_table import level_name, levels
from bench.running import Table, short
from bench.tables import MISSING, mib, number
from bench.tables import table as lines_of

MODELS = (
    "bench.models.bert_base:fp16=bench.models.redrawn:bert_base",
    "bench.models.resnet50:fp16=bench.models.redrawn:resnet50",
)
HEAD = (
    "model",
    "weights: how many, MiB",
    "refit / copy of each array / one copy, from pageable memory, ms",
    "the same from page-locked memory, ms",
    "replay before / after, us",
    "a fresh compile's results",
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL=OTHER", limit_s=540)
    made.add_argument("--level", type=int, default=2)
    made.add_argument("--cpu", action="store_true", help="use the CPU target, to try the program without a GPU")
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model."""
    level, flags = options.level, ("--cpu",) if options.cpu else ()
    pairs = [asked.split("=") for asked in options.models or MODELS]
    programs = {m: {level_name(level): ("bench.refit_peer", str(level), m, other, *flags)} for m, other in pairs}
    return running.table("refit.json", programs, options)


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model; in brackets, the refit's time over that of a copy of each array, and of one."""
    models = results["models"].items()
    rows = [[f"{short(spec)} {mode}", *_cells(modes[mode])] for spec, modes in models for mode in levels(modes)]
    return "\n".join([*lines_of(HEAD, rows), "", environment.provenance(results)])


def _cells(figures: Mapping[str, Any]) -> list[str]:
    if "failed" in figures:
        return [MISSING] * 4 + [f"failed: {figures['failed'][:200]}"]
    replays = (_median(figures, clock) for clock in ("kernels_us", "kernels_after_us"))
    return [
        f"{figures['weights']}, {mib(figures['weights_nbytes'])}",
        *(_times(figures, kind) for kind in ("", "_locked")),
        " / ".join(number(us, 1) for us in replays),
        _result(figures),
    ]


def _times(figures: Mapping[str, Any], kind: str) -> str:
    names = [f"{name}{kind}" for name in ("refit", "copies", "copy")]
    refit, copies, copy = (_median(figures, f"{name}_us") for name in names)
    noisy = "~" if set(names) & set(figures["noisy"]) else ""
    times = " / ".join(number(us and us / 1000, 2) for us in (refit, copies, copy))
    ratios = "; ".join(number(refit and us and refit / us, 2) for us in (copies, copy))
    return f"{noisy}{times} ({ratios})"


def _median(figures: Mapping[str, Any], clock: str) -> float | None:
    return float(figures[clock]["median"]) if clock in figures else None


def _result(figures: Mapping[str, Any]) -> str:
    kept = f", {len(figures['kept'])} weights kept" if figures["kept"] else ""
    if figures["equal"]:
        return f"equal{kept}"
    kernels = "the same" if figures["same_kernels"] else "other"
    return f"differ by {figures['difference']:.1e}, {kernels} kernels{kept}"


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
