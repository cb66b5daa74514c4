"""A while loop whose body has a hundred kernels, beside the body alone as one CUDA graph.

    python -m bench.loops -o bench/results/gpu/loops.json
    python -m bench.loops --show bench/results/gpu/loops.json

Figures are GPU microseconds between events around a launch, medians of many, on one stream: those of the body, and
those of one trip, which are the difference between 101 trips and 1, divided by 100. At -O0 the kernels are elementwise,
at -O1 products of one row. Nothing else may use the GPU meanwhile.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import environment
from bench.nimblec_peer import gpu_us, placed
from bench.tables import number, table
from nimblert.executable import Executable

_KERNELS, _TRIPS, _SIZE = 100, 100, 64


class _Chain(torch.nn.Module):
    def __init__(self, level: int, trips: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trips = trips
        layers = (torch.nn.Linear(_SIZE, _SIZE) if level else torch.nn.Tanh() for _ in range(_KERNELS))
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.trips:
            return self.layers(x)
        begin = torch.zeros((), dtype=torch.int64, device=x.device)
        carried = (begin, x.clone())
        _, x = torch.while_loop(lambda trip, _: trip < self.trips, lambda trip, x: (trip + 1, self.layers(x)), carried)
        return x


def prepared(level: int) -> dict[int, Executable]:
    """Return plans that have run once, by the number of trips; 0: the body alone."""
    import nimblec

    made = {}
    for trips in (0, 1, 1 + _TRIPS):
        chain, example = _Chain(level, trips).eval(), (torch.randn(1, _SIZE),)
        made[trips] = placed(nimblec.compile(chain, example, target="cuda", level=level, plan_cache=None, streams=1))
    return made


def measure(loaded: dict[int, Executable]) -> dict[str, Any]:
    """Return the microseconds of the body and of one trip, and the kernels of the body."""
    body_us, one_us, all_us = (float(np.median(gpu_us(each))) for each in loaded.values())
    return {"body_us": body_us, "trip_us": (all_us - one_us) / _TRIPS, "kernels": len(loaded[0].program.commands)}


def show(figures: dict[str, Any]) -> list[str]:
    """Return the table."""
    rows = []
    for level, found in figures["figures"].items():
        body, trip = found["body_us"], found["trip_us"]
        rows.append([f"-O{level}", str(found["kernels"]), number(body, 1), number(trip, 1), number(trip / body, 4)])
    return table(["level", "kernels of the body", "body as a graph, us", "one trip, us", "ratio"], rows)


def main(arguments: Sequence[str]) -> None:
    """Measure at -O0 and -O1, and write and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.loops", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of these figures")
    options = parser.parse_args(arguments)
    if options.show:
        figures = json.loads(options.show.read_text())
    else:
        found = {str(level): measure(prepared(level)) for level in (0, 1)}
        figures = {"machine": environment.describe(), "figures": found}
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(show(figures)))


if __name__ == "__main__":
    main(sys.argv[1:])
