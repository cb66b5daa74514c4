"""A decoder step with its cache as state: eager, torch.compile, and plans of each level.

Usage: python -m bench.decoder [--markdown] [MODEL ...], a model being package.module:callable. The modes are those of
bench/decoder_peer.py; the processes prepare side by side and measure alone (bench/running.py). Writes decoder.json in
bench/results/gpu, or --output; --markdown prints its table. --add measures only what the file lacks of this commit.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.peers_table import Figures, cell
from bench.running import Table, short
from bench.tables import MISSING, header, row
from bench.turns import Job

MODES = ("O2", "O1", "O0", "given", "freeze", "compile", "eager")
"""Of bench.decoder_peer, which is not imported here: it brings in PyTorch. The slowest come first."""
MODELS = ("bench.models.llama_decoder:bf16",)
_CLOCKS = ("kernels_us", "call_us", "token_us")
_HEAD = ("model", "mode", *_CLOCKS, "launches / ours", "equal tokens", "logits, relative", "state", "written by")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = running.table_parser(__doc__, "MODEL", limit_s=480)
    made.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The path of the results."""
    return options.output or FOLDER / "decoder.json"


def table(options: argparse.Namespace) -> Table:
    """The jobs by model."""
    path = results_path(options)

    def job(spec: str, mode: str) -> Job:
        command = (sys.executable, "-m", "bench.decoder_peer", mode, spec, "--turns")
        return Job(table=str(path), model=spec, mode=mode, command=command, limit_s=options.limit)

    modes = options.modes.split(",")
    return Table(path=path, jobs=tuple(tuple(job(s, mode) for mode in modes) for s in options.models or MODELS))


def equal_tokens(figures: Figures, mode: str) -> str:
    """The number of tokens before the first that differs from -O0's, and the number of all."""
    wanted, found = (figures.get(name, {}).get("tokens") for name in ("O0", mode))
    if not wanted or not found:
        return MISSING
    count = next((i for i, pair in enumerate(zip(wanted, found, strict=True)) if len({*pair}) > 1), len(wanted))
    return f"{count} of {len(wanted)}"


def difference(figures: Figures, mode: str) -> str:
    """The largest relative difference of a step's highest logit from -O0's."""
    wanted, found = (figures.get(name, {}).get("logits") for name in ("O0", mode))
    if not wanted or not found:
        return MISSING
    return f"{max(abs(b - a) / abs(a) for a, b in zip(wanted, found, strict=True)):.1e}"


def markdown(results: dict[str, Any]) -> str:
    """A line for each model and mode; microseconds."""
    lines = header(_HEAD)
    for spec, figures in results["models"].items():
        for mode in (mode for mode in MODES if mode in figures):
            found = figures[mode]
            lines.append(
                row([
                    short(spec),
                    mode,
                    *(cell(figures, mode, clock) for clock in _CLOCKS),
                    f"{found.get('launches', '-')} / {found.get('own_launches', '-')}",
                    equal_tokens(figures, mode),
                    difference(figures, mode),
                    _counted(found.get("uses")),
                    _counted(found.get("writers")),
                ])
            )
    return "\n".join([*lines, "", environment.provenance(results)])


def _counted(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) if counts else MISSING


def main(arguments: list[str]) -> None:
    """Measure, or show the results."""
    options = parser().parse_args(arguments)
    running.measure_or_show(table(options), options, markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
