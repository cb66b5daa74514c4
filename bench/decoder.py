"""A decoder step with its cache as state: eager, torch.compile, and plans of each level.

Usage: python -m bench.decoder [--markdown] [MODEL ...], a model being package.module:callable. The modes are those of
bench/decoder_peer.py; the processes prepare side by side and measure alone (bench/running.py). Writes decoder.json in
bench/results/gpu, or --output; --markdown prints its table. --add measures only what the file lacks of this commit.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import environment, running
from bench.peers_table import Figures, cell
from bench.running import Table, short
from bench.tables import MISSING, by_columns

MODES = ("O2", "O1", "O0", "given", "freeze", "compile", "eager")
"""The modes of bench.decoder_peer, which is not imported here as it imports PyTorch. The slowest come first."""
MODELS = ("bench.models.llama_decoder:bf16", "bench.models.llama_decoder:tiny")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=480)
    made.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    return made


def table(options: argparse.Namespace) -> Table:
    """Return the jobs by model."""
    modes = options.modes.split(",")
    programs = {s: {mode: ("bench.decoder_peer", mode, s) for mode in modes} for s in options.models or MODELS}
    return running.table("decoder.json", programs, options)


def _beside_eager(figures: Figures, mode: str, name: str) -> list[tuple[Any, Any]]:
    """Return the figures of each token at -O0 and in another mode; empty if either is missing."""
    return [*zip(*(figures.get(each, {}).get(name, ()) for each in ("O0", mode)), strict=False)]


def equal_tokens(figures: Figures, mode: str) -> str:
    """Return the number of tokens before the first that differs from -O0's, and the number of all."""
    pairs = _beside_eager(figures, mode, "tokens")
    equal = next((i for i, (wanted, found) in enumerate(pairs) if wanted != found), len(pairs))
    return f"{equal} of {len(pairs)}" if pairs else MISSING


def difference(figures: Figures, mode: str) -> str:
    """Return the largest relative difference of a step's highest logit from -O0's."""
    pairs = _beside_eager(figures, mode, "logits")
    return f"{max(abs(b - a) / abs(a) for a, b in pairs):.1e}" if pairs else MISSING


def _counted(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) if counts else MISSING


COLUMNS: dict[str, Callable[[str, Figures, str], str]] = {
    "model": lambda spec, _, __: short(spec),
    "mode": lambda _, __, mode: mode,
    "kernels_us": lambda _, figures, mode: cell(figures, mode, "kernels_us"),
    "call_us": lambda _, figures, mode: cell(figures, mode, "call_us"),
    "token_us": lambda _, figures, mode: cell(figures, mode, "token_us"),
    "launches / ours": lambda _, f, mode: f"{f[mode].get('launches', '-')} / {f[mode].get('own_launches', '-')}",
    "equal tokens": lambda _, figures, mode: equal_tokens(figures, mode),
    "logits, relative": lambda _, figures, mode: difference(figures, mode),
    "state": lambda _, figures, mode: _counted(figures[mode].get("uses")),
    "written by": lambda _, figures, mode: _counted(figures[mode].get("writers")),
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model and mode; times are in microseconds."""
    rows = [(spec, f, mode) for spec, f in results["models"].items() for mode in MODES if mode in f]
    return "\n".join([*by_columns(COLUMNS, rows), "", environment.provenance(results)])


def main(arguments: Sequence[str]) -> None:
    """Measure, or show the results."""
    running.main(arguments, parser(), table, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
