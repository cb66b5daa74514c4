"""Preparation time: how long a network takes to compile at -O0, and the part of it that captures the network.

Usage: python -m bench.preparation [--markdown] [--output FILE] [MODEL ...]; MODEL is package.module:callable. Writes
bench/results/gpu/preparation.json. The networks are those of Kwon et al. (Nimble, 2020), where capturing takes 0.35 s
in the mean and 1.07 s at most. "capture" is two captures in two memories, by which nimblec finds the pointers. The rest
is mostly imports, the framework's first run and the check of the plan. Processes run one after the other.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from bench import compiling, environment, running
from bench.running import short
from bench.tables import by_columns

NETWORKS = (
    *("resnet50", "inception_v3", "nasnet_a_mobile", "nasnet_a_large"),
    *("mobilenet_v2", "efficientnet_b0", "efficientnet_b5"),
)
MODELS = tuple(f"bench.models.{name}:fp32" for name in NETWORKS)
_STAGES = ("import the framework", "load the model", "warm up", "capture", "schedule", "write", "check")


def measure(model: str) -> dict[str, Any]:
    """Return the seconds of a compilation and of its stages, and the number of commands of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        plan, figures = compiling.compiled(model, compiling.options(Path(folder), 0), Path(folder) / "model.plan")
    return {**figures, "commands": len(plan.programs[0].commands)}


def _stage(name: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda _, figures: f"{figures['stages_s'].get(name, 0.0):.2f}"


COLUMNS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "model": lambda model, _: short(model),
    "commands": lambda _, figures: str(figures["commands"]),
    "compile -O0, s": lambda _, figures: f"{figures['prepare_s']:.1f}",
    **{name: _stage(name) for name in _STAGES},
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each network, and the mean and the longest capture."""
    captures = [figures["stages_s"]["capture"] for figures in results["compilations"].values()]
    summary = f"Captures: {mean(captures):.2f} s in the mean, {max(captures):.2f} s at most."
    lines = by_columns(COLUMNS, results["compilations"].items())
    return "\n".join((*lines, "", summary, environment.provenance(results)))


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--output", type=Path, default=running.FOLDER / "preparation.json", help="path of the results")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if not options.markdown:
        environment.write(options.output, {"compilations": {model: measure(model) for model in options.models}})
    print(markdown(environment.read(options.output)))


if __name__ == "__main__":
    main(sys.argv[1:])
