"""The overhead of a plan's calls over their replay.

Usage: python -m bench.calls --markdown [--results FILE], which prints the table from the results of `bench.peers`.

The limit for a call from numpy is its replay, plus 25 us, plus 1.3 times the copy of its bytes from page-locked memory.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import environment, peers
from bench.peers_table import COMPILED_MODES, Figures, cell, fastest, geometric_mean, levels, microseconds
from bench.running import short
from bench.tables import header, number, row

_HEAD = (
    "model",
    "replay, us",
    "from numpy, us (of the replay; allowed)",
    "the same, images channels last, us",
    "the same from page-locked arrays, us (of the replay)",
    "from the GPU, us (above its GPU time)",
    "launch of bound arrays / of torch.cuda.CUDAGraph, us of the caller's time",
)
_ALLOWED_US = 25.0
_ALLOWED_COPIES = 1.3


def allowed_us(figures: Mapping[str, Any]) -> float:
    """The limit for a call from numpy."""
    gbps = min(figures["page_locked_gbps"].values())
    return float(figures["replay_us"]["median"] + _ALLOWED_US + _ALLOWED_COPIES * figures["moved_nbytes"] / gbps / 1e3)


def markdown(results: dict[str, Any]) -> str:
    """A line for each network, and the geometric means of calls from numpy over their replay."""
    below = environment.provenance(results)
    lines = header(_HEAD)
    ratios, locked_ratios = [], []
    for spec, figures in results["models"].items():
        mode = fastest(figures, levels(figures), "call_us")
        if mode is None:
            continue
        ratio = microseconds(figures, mode, "numpy_us") / microseconds(figures, mode, "replay_us")
        ratios.append(ratio)
        locked = microseconds(figures, mode, "page_locked_us") / microseconds(figures, mode, "replay_us")
        locked_ratios.append(locked)
        above = microseconds(figures, mode, "call_us") - microseconds(figures, mode, "kernels_us")
        theirs = fastest(figures, ("graph", *COMPILED_MODES), "launch_us")
        cells = [
            short(spec),
            cell(figures, mode, "replay_us"),
            f"{cell(figures, mode, 'numpy_us')} ({number(ratio, 2)}; {number(allowed_us(figures[mode]), 0)})",
            cell(figures, mode, "other_order_us"),
            cell(figures, mode, "page_locked_us") + (f" ({number(locked, 2)})" if locked < math.inf else ""),
            f"{cell(figures, mode, 'call_us')} ({number(above, 1)})",
            f"{_launch(figures, mode)} / {_launch(figures, theirs)}",
        ]
        lines.append(row(cells))
    means = [number(geometric_mean(found), 2) for found in (ratios, locked_ratios)]
    lines.append(row(["geometric mean", "", means[0], "", means[1], "", ""]))
    return "\n".join([*lines, "", below])


def _launch(figures: Figures, mode: str | None) -> str:
    return cell(figures, mode, "launch_us", digits=1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", required=True)
    parser.add_argument("--results", type=Path, default=peers.FOLDER / "peers.json", help="a file of `bench.peers`")
    print(markdown(environment.read(parser.parse_args().results)))


if __name__ == "__main__":
    main()
