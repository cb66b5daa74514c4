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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench import environment, running
from bench.peers_table import level_name, levels
from bench.running import Table, short
from bench.tables import MISSING, by_columns, mib, number

MODELS = ("bench.models.sized:resnet50=1..64", "bench.models.sized:bert_base=32..512")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL[=SIZES]", limit_s=540)
    made.add_argument("--level", type=int, default=2)
    made.add_argument("--cpu", action="store_true", help="use the CPU target, to try the program without a GPU")
    made.add_argument("--workers", type=int, default=8, help="compilations of a process side by side")
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model."""
    flags = ("--workers", str(options.workers), *(["--cpu"] if options.cpu else []))
    programs = {}
    for spec, _, sizes in (asked.partition("=") for asked in options.models or MODELS):
        chosen = ("--sizes", sizes) if sizes else ()
        program = ("bench.sizes_peer", str(options.level), spec, *chosen, *flags)
        programs[spec] = {level_name(options.level): program}
    return running.table("sizes.json", programs, options)


def ratio(figures: Mapping[str, Any], clock: str, size: str) -> float | None:
    """Return the time of one plan at a size over that of the static plan; None if it was not measured."""
    ours, static = figures.get(f"{clock} {size}"), figures.get(f"static_{clock} {size}")
    return float(ours["median"] / static["median"]) if ours and static else None


def _pair(group: str, _: str, size: str, figures: Mapping[str, Any]) -> str:
    clock = f"{group}_us"
    found = ratio(figures, clock, size)
    if found is None:
        return MISSING
    ours, static = (figures[f"{kind}{clock} {size}"]["median"] for kind in ("", "static_"))
    noisy = "~" if f"{group} {size}" in figures["noisy"] else ""
    return f"{noisy}{number(ours, 0)} / {noisy}{number(static, 0)} ({number(found, 2)})"


def _result(_: str, size: str, figures: Mapping[str, Any]) -> str:
    found = figures["sizes"][size]
    if "refused" in found:
        return "refused"
    return "equal" if found["equal"] else f"differs by {found['difference']:.1e}"


COLUMNS: dict[str, Callable[[str, str, Mapping[str, Any]], str]] = {
    "model": lambda name, _, __: name,
    "size": lambda _, size, __: size,
    "profile": lambda _, size, figures: str(figures["sizes"][size]["served_by"]),
    "GPU time: one plan / static, us": partial(_pair, "kernels"),
    "call: one plan / static, us": partial(_pair, "call"),
    "call from numpy: one plan / static, us": partial(_pair, "numpy"),
    "result": _result,
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each size of a model, and a sentence on all sizes of each."""
    models = results["models"].items()
    plans = [(f"{short(spec)} {mode}", modes[mode]) for spec, modes in models for mode in levels(modes)]
    rows = [(name, size, figures) for name, figures in plans for size in sorted(figures.get("sizes", {}), key=int)]
    below = [_together(*plan) for plan in plans]
    return "\n".join([*by_columns(COLUMNS, rows), "", *below, environment.provenance(results)])


def _together(name: str, figures: Mapping[str, Any]) -> str:
    """Return a sentence on a plan's bytes, and on the size with the largest overhead."""
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


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
