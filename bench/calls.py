"""The overhead of a plan's calls over their replay.

Usage: python -m bench.calls --markdown [--results FILE], which prints the table from the results of `bench.peers`.

The limit for a call from numpy is its replay, plus 25 us, plus 1.3 times the copy of its bytes from page-locked memory.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers_table import COMPILED_MODES, Figures, cell, fastest, geometric_mean, levels, microseconds
from bench.running import short
from bench.tables import MISSING, by_columns, number, row

_ALLOWED_US = 25.0
_ALLOWED_COPIES = 1.3


def allowed_us(figures: Mapping[str, Any]) -> float:
    """Return the limit for a call from numpy."""
    gbps = min(figures["page_locked_gbps"].values())
    return float(figures["replay_us"]["median"] + _ALLOWED_US + _ALLOWED_COPIES * figures["moved_nbytes"] / gbps / 1e3)


def _of_replay(figures: Figures, mode: str, clock: str) -> float:
    return microseconds(figures, mode, clock) / microseconds(figures, mode, "replay_us")


def _numpy(_: str, f: Figures, mode: str) -> str:
    ratio = number(_of_replay(f, mode, "numpy_us"), 2)
    return f"{cell(f, mode, 'numpy_us')} ({ratio}; {number(allowed_us(f[mode]), 0)})"


def _page_locked(_: str, f: Figures, mode: str) -> str:
    ratio = number(_of_replay(f, mode, "page_locked_us"), 2)
    return cell(f, mode, "page_locked_us") + ("" if ratio == MISSING else f" ({ratio})")


def _from_gpu(_: str, f: Figures, mode: str) -> str:
    above = microseconds(f, mode, "call_us") - microseconds(f, mode, "kernels_us")
    return f"{cell(f, mode, 'call_us')} ({number(above, 1)})"


def _launch(_: str, f: Figures, mode: str) -> str:
    theirs = fastest(f, ("graph", *COMPILED_MODES), "launch_us")
    return " / ".join(cell(f, each, "launch_us", digits=1) for each in (mode, theirs))


COLUMNS: dict[str, Callable[[str, Figures, str], str]] = {
    "model": lambda spec, _, __: short(spec),
    "replay, us": lambda _, f, mode: cell(f, mode, "replay_us"),
    "from numpy, us (of the replay; allowed)": _numpy,
    "the same, images channels last, us": lambda _, f, mode: cell(f, mode, "other_order_us"),
    "the same from page-locked arrays, us (of the replay)": _page_locked,
    "from the GPU, us (above its GPU time)": _from_gpu,
    "launch of bound arrays / of torch.cuda.CUDAGraph, us of the caller's time": _launch,
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each network, and the geometric means of calls from numpy over their replay."""
    fastest_modes = ((spec, f, fastest(f, levels(f), "call_us")) for spec, f in results["models"].items())
    rows = [(spec, f, mode) for spec, f, mode in fastest_modes if mode is not None]
    numpy, locked = (
        number(geometric_mean(_of_replay(f, mode, clock) for _, f, mode in rows), 2)
        for clock in ("numpy_us", "page_locked_us")
    )
    below = row(["geometric mean", "", numpy, "", locked, "", ""])
    return "\n".join([*by_columns(COLUMNS, rows), below, "", environment.provenance(results)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", required=True)
    parser.add_argument("--results", type=Path, default=running.FOLDER / "peers.json", help="a file of `bench.peers`")
    print(markdown(environment.read(parser.parse_args().results)))


if __name__ == "__main__":
    main()
