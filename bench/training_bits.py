"""Training steps of plans at -O0 compared with eager's: bit for bit, or with the differences between eager's own runs.

Usage: python -m bench.training_bits [--markdown] [--steps N] [--fp32] [NETWORK ...], a network being one of
bench.models.training_bits. The processes (bench/training_bits_peer.py) run side by side, as nothing is timed. Writes
training_bits.json (training_bits_fp32.json) in bench/results/gpu, or --output; --markdown prints its table. --add
compares only what the file lacks of this commit.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import environment, running
from bench.running import Table
from bench.tables import MISSING
from bench.tables import table as lines_of

NETWORKS = ("efficientnet_b0", "resnet50", "mobilenet_v2", "bert", "gpt")
"""The slowest come first."""
MODES = ("default", "deterministic")
"""The modes of bench.training_bits_peer, which is not imported here as it imports PyTorch."""
_DRAWN = {"plan": "the plan's, for eager too", "torch": "torch's", "none": "none"}
HEAD = (
    *("network", "random numbers", "equal losses", "equal state"),
    *("losses by default: plan / eager's own", "state by default: plan / eager's own", "within"),
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "NETWORK", limit_s=570)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--fp32", action="store_true", help="without TF32")
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by network."""
    given = ("--steps", str(options.steps), *(["--fp32"] if options.fp32 else []))
    networks = options.models or NETWORKS
    programs = {n: {mode: ("bench.training_bits_peer", mode, n, *given) for mode in MODES} for n in networks}
    return running.table("training_bits_fp32.json" if options.fp32 else "training_bits.json", programs, options)


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each network; "within": whether the plan is as close to eager as eager's runs are."""
    rows = []
    for network, modes in results["models"].items():
        exact, usual = (modes.get(mode, {}) for mode in ("deterministic", "default"))
        drawn = _DRAWN.get({**usual, **exact}.get("draws", ""), MISSING)
        rows.append([network, drawn, *_equal(exact), *_near(usual)])
    return "\n".join([*lines_of(HEAD, rows), "", environment.provenance(results)])


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


def main(arguments: Sequence[str]) -> None:
    """Compare, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
