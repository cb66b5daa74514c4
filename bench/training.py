"""What a training step takes: eager's call, torch.compile's whole step in one CUDA graph, and plans of each level.

Usage: python -m bench.training [--markdown] [--autocast bf16] [MODEL ...], a model being NETWORK_batch_N of
bench.models.cifar_training, which --autocast measures under torch.autocast alone, by the name NETWORK_batch_N_bf16.
The processes get ready side by side and measure alone (bench/running.py). Writes training.json in bench/results/h200,
or --output; --markdown prints its table. With --add only what the file does not hold of this commit is measured.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import environment, running
from bench.peers import FOLDER
from bench.peers_table import cell, row
from bench.running import Table
from bench.turns import Job

MODES = ("eager", "compile", "O0", "O1", "O2")
"""Of bench.training_peer, which is not imported here: it brings in PyTorch."""
NETWORKS = ("mobilenet_v2", "resnet50", "efficientnet_b0")
BATCHES = (2, 8, 32, 128)
MODELS = tuple(f"{network}_batch_{batch}" for network in NETWORKS for batch in BATCHES)
_CLOCKS = (
    *(("eager", "call_us"), ("compile", "call_us")),
    *((level, clock) for level in MODES[2:] for clock in ("call_us", "kernels_us", "chain_us")),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar="MODEL")
    made.add_argument("--autocast", choices=["bf16"], help="what the models compute in, in all modes")
    made.add_argument("--limit", type=float, default=400, help="seconds that a process may take")
    made.add_argument("--output", type=Path, help="where the figures are")
    made.add_argument("--markdown", action="store_true")
    running.add_options(made)
    return made


def results_path(options: argparse.Namespace) -> Path:
    """The file of the figures."""
    return options.output or FOLDER / "training.json"


def table(options: argparse.Namespace) -> Table:
    """What to run, by model."""
    path = results_path(options)

    def jobs(model: str) -> tuple[Job, ...]:
        command = (sys.executable, "-m", "bench.training_peer")
        return tuple(
            Job(
                table=str(path),
                model=model,
                mode=mode,
                command=(*command, mode, model, "--turns"),
                limit_s=options.limit,
            )
            for mode in MODES
        )

    suffix = f"_{options.autocast}" if options.autocast else ""
    return Table(path=path, jobs=tuple(jobs(f"{model}{suffix}") for model in options.models or MODELS))


def markdown(results: dict[str, Any]) -> str:
    """A line for each model; microseconds."""
    head = ["model", *(" ".join(clock) for clock in _CLOCKS)]
    lines = [row(head), "|---" * len(head) + "|"]
    for model, figures in results["models"].items():
        lines.append(row([model, *(cell(figures, *clock) for clock in _CLOCKS)]))
    return "\n".join([*lines, "", environment.provenance(results)])


def main(arguments: list[str]) -> None:
    """Measure, or show what was measured."""
    options = parser().parse_args(arguments)
    if not options.markdown:
        running.measure([table(options)], options)
    running.show(options, results_path(options), markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
