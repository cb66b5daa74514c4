"""Training steps of plans at -O0 compared with eager's: bit for bit, or with the differences between eager's own runs.

Usage: python -m bench.training_bits [--markdown] [--steps N] [--fp32] [NETWORK ...], a network being one of
bench.models.training_bits. The processes (bench/training_bits_peer.py) run side by side, as nothing is timed. Writes
training_bits.json (training_bits_fp32.json) in bench/results/gpu, or --output; --markdown prints its table. --add
compares only what the file lacks of this commit.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.running import Table
from bench.tables import MISSING, header, row
from bench.turns import Job

NETWORKS = ("efficientnet_b0", "resnet50", "mobilenet_v2", "bert", "gpt")
"""The slowest come first."""
MODES = ("default", "deterministic")
"""Of bench.training_bits_peer, which is not imported here: it brings in PyTorch."""
_DRAWN = {"plan": "the plan's, for eager too", "torch": "torch's", "none": "none"}
_HEAD = (
    *("network", "random numbers", "equal losses", "equal state"),
    *("losses by default: plan / eager's own", "state by default: plan / eager's own", "within"),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = running.table_parser(__doc__, "NETWORK", limit_s=570)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--fp32", action="store_true", help="without TF32")
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The path of the results."""
    return options.output or FOLDER / ("training_bits_fp32.json" if options.fp32 else "training_bits.json")


def table(options: argparse.Namespace) -> Table:
    """The jobs by network."""
    path = results_path(options)
    given = ("--steps", str(options.steps), *(["--fp32"] if options.fp32 else []), "--turns")

    def job(network: str, mode: str) -> Job:
        command = (sys.executable, "-m", "bench.training_bits_peer", mode, network, *given)
        return Job(table=str(path), model=network, mode=mode, command=command, limit_s=options.limit)

    networks = options.models or NETWORKS
    return Table(path=path, jobs=tuple(tuple(job(network, mode) for mode in MODES) for network in networks))


def markdown(results: dict[str, Any]) -> str:
    """A line for each network; "within": whether the plan is as close to eager as eager's runs to each other."""
    lines = header(_HEAD)
    for network, modes in results["models"].items():
        exact, usual = (modes.get(mode, {}) for mode in ("deterministic", "default"))
        drawn = _DRAWN.get({**usual, **exact}.get("draws", ""), MISSING)
        lines.append(row([network, drawn, *_equal(exact), *_near(usual)]))
    return "\n".join([*lines, "", environment.provenance(results)])


def _equal(figures: Mapping[str, Any]) -> tuple[str, str]:
    if "equal_losses" not in figures:
        return MISSING, MISSING
    unequal = len(figures["unequal_state"])
    return f"{figures['equal_losses']} of {figures['steps']}", f"all but {unequal}" if unequal else "all"


def _near(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    found = figures.get("distances")
    if found is None:
        return MISSING, MISSING, MISSING
    losses, state = (f"{found[name]['plan']:.1e} / {found[name]['own']:.1e}" for name in ("losses", "state"))
    return losses, state, "yes" if all(each["plan"] <= each["own"] for each in found.values()) else "**no**"


def main(arguments: list[str]) -> None:
    """Compare, or show the results."""
    options = parser().parse_args(arguments)
    running.measure_or_show(table(options), options, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
