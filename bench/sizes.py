"""One plan for any size of a network, compared with static plans: file, arena, results and calls.

Usage: python -m bench.sizes [--markdown] [--level N] [MODEL[=SIZES] ...], MODEL a callable of bench.models.sized, SIZES
the sizes of the profiles ("1..64": powers of two and both ends). The processes prepare side by side and measure alone
(bench/running.py), each compiles --workers plans at a time. Writes sizes.json in bench/results/gpu, or --output;
--markdown prints its table. --add measures only what the file lacks of this commit.

On one H200, `python -m bench.sizes --level 1 --jobs 2` compiles twelve static plans and two for all sizes, and takes
two minutes.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.peers_table import level_name, levels
from bench.running import Table, short
from bench.tables import MISSING, header, mib, number, row
from bench.turns import Job

MODELS = ("bench.models.sized:resnet50=1..64", "bench.models.sized:bert_base=32..512")
_CLOCKS = {"kernels": "kernels_us", "call": "call_us", "numpy": "numpy_us"}
"""The clock of each group that is sampled."""
_HEAD = (
    "model",
    "size",
    "profile",
    "GPU time: one plan / static, us",
    "call: one plan / static, us",
    "call from numpy: one plan / static, us",
    "result",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = running.table_parser(__doc__, "MODEL[=SIZES]", limit_s=540)
    made.add_argument("--level", type=int, default=2)
    made.add_argument("--cpu", action="store_true", help="use the CPU target, to try the program without a GPU")
    made.add_argument("--workers", type=int, default=8, help="compilations of a process side by side")
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The path of the results."""
    return options.output or FOLDER / "sizes.json"


def table(options: argparse.Namespace) -> Table:
    """The jobs by model."""
    path, level = results_path(options), options.level

    def job(asked: str) -> Job:
        spec, _, sizes = asked.partition("=")
        chosen = ("--sizes", sizes) if sizes else ()
        program = (sys.executable, "-m", "bench.sizes_peer", str(level), spec, *chosen)
        flags = ("--cpu",) if options.cpu else ()
        command = (*program, "--workers", str(options.workers), *flags, "--turns")
        return Job(table=str(path), model=spec, mode=level_name(level), command=command, limit_s=options.limit)

    return Table(path=path, jobs=tuple((job(asked),) for asked in options.models or MODELS))


def ratio(figures: Mapping[str, Any], clock: str, size: str) -> float | None:
    """The time of one plan at a size over that of the static plan; None if it was not measured."""
    ours, static = figures.get(f"{clock} {size}"), figures.get(f"static_{clock} {size}")
    return float(ours["median"] / static["median"]) if ours and static else None


def markdown(results: dict[str, Any]) -> str:
    """A line for each size of a model, and a sentence on all sizes of each."""
    lines = header(_HEAD)
    below = []
    for spec, modes in results["models"].items():
        for mode in levels(modes):
            figures = modes[mode]
            asked = sorted(figures.get("sizes", {}), key=int)
            lines += [_line(f"{short(spec)} {mode}", size, figures) for size in asked]
            below.append(_together(f"{short(spec)} {mode}", figures))
    return "\n".join([*lines, "", *below, environment.provenance(results)])


def _line(name: str, size: str, figures: Mapping[str, Any]) -> str:
    found = figures["sizes"][size]
    cells = [_pair(figures, group, clock, size) for group, clock in _CLOCKS.items()]
    return row([name, size, str(found["served_by"]), *cells, _result(found)])


def _pair(figures: Mapping[str, Any], group: str, clock: str, size: str) -> str:
    found = ratio(figures, clock, size)
    if found is None:
        return MISSING
    ours, static = (figures[f"{kind}{clock} {size}"]["median"] for kind in ("", "static_"))
    noisy = "~" if f"{group} {size}" in figures["noisy"] else ""
    return f"{noisy}{number(ours, 0)} / {noisy}{number(static, 0)} ({number(found, 2)})"


def _result(found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return "refused"
    return "equal" if found["equal"] else f"differs by {found['difference']:.1e}"


def _together(name: str, figures: Mapping[str, Any]) -> str:
    """A sentence on a plan's bytes, and on the size with the largest overhead."""
    if "failed" in figures:
        return f"{name}: failed: {figures['failed'][:200]}."
    static = figures["static"]
    files, arenas = (max(each[kind] for each in static.values()) for kind in ("file_nbytes", "arena_nbytes"))
    clock = "call_us" if f"call_us {next(iter(static))}" in figures else "numpy_us"
    ratios = {size: found for size in figures["sizes"] if (found := ratio(figures, clock, size)) is not None}
    calls = "no size was called"
    if ratios:
        worst = max(ratios, key=ratios.__getitem__)
        calls = f"a call takes at most {ratios[worst]:.2f} times the static plan's (size {worst})"
    return (
        f"{name}: the file has {mib(figures['file_nbytes'])} MiB, {figures['file_nbytes'] / files:.2f} times "
        f"the largest static plan's; the arena {mib(figures['arena_nbytes'])} MiB, of the largest static plan "
        f"{mib(arenas)}; {calls}."
    )


def main(arguments: list[str]) -> None:
    """Measure, or show the results."""
    options = parser().parse_args(arguments)
    running.measure_or_show(table(options), options, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
