"""Time from process start to the first training step of a plan that resumes from a saved state, without PyTorch.

Usage: python -m bench.resume [--markdown] [--level N] [--cpu] [--output FILE] [MODEL], a model being NETWORK_batch_N of
bench.models.training_networks; writes bench/results/gpu/resume.json. --cpu tries the program on the CPU target.

A plan takes some steps, saves its state as safetensors, and takes one more, whose loss the fresh processes must repeat.
"seconds" runs from before a process starts until it has that loss, in the stages "python", "import", "load", "state"
and "step". A first process, which is not counted, writes the bytecode. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench import compiling, environment, running
from bench.models import training_networks
from bench.tables import by_columns
from nimblert.loading import load

_REPEATS, _STEPS = 7, 3
_STAGES = ("python", "import", "load", "state", "step")

_LEAN = """
import time
times = [time.time()]
import json, sys
import numpy as np
import nimblert
times.append(time.time())
with nimblert.load(sys.argv[1]) as model:
    times.append(time.time())
    model.state.load(sys.argv[2])
    times.append(time.time())
    batch = np.load(sys.argv[3])
    loss = np.asarray(model(*batch.values(), entry="train"))
    times.append(time.time())
torch = [name for name in sys.modules if name.partition(".")[0] == "torch"]
print(json.dumps({"times": times, "loss": loss.tobytes().hex(), "torch": len(torch)}))
"""


def resumed(*files: Path) -> dict[str, Any]:
    """Return the figures of one fresh process: seconds of its stages, loss, and imported modules of torch."""
    environment_of_users = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.time()
    command = [sys.executable, "-c", _LEAN, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment_of_users)
    said: dict[str, Any] = json.loads(done.stdout)
    times = [begin, *said.pop("times")]
    return {
        **said,
        "seconds": times[-1] - begin,
        **{name: after - before for name, before, after in zip(_STAGES, times, times[1:], strict=False)},
    }


def measure(model: str, level: int, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the figures of several starts; the first, with cold files, is kept separately."""
    plan, state, batch = (folder / name for name in ("train.plan", "state.safetensors", "batch.npz"))
    how = compiling.options(folder, None if cpu else level)
    _, figures = compiling.compiled(f"{training_networks.__name__}:{model}", how, plan)
    network, count, _ = training_networks.split(model)
    arrays = [tensor.numpy() for tensor in training_networks.parts(network, count)[2]]
    np.savez(batch, *arrays)
    with load(plan) as loaded:
        for _ in range(_STEPS):
            loaded(*arrays, entry="train")
        loaded.state.save(state)
        expected = np.asarray(loaded(*arrays, entry="train")).tobytes().hex()
    first, *runs = [resumed(plan, state, batch) for _ in range(_REPEATS + 1)]
    return {
        "model": model,
        "level": None if cpu else level,
        "first": first,
        "runs": sorted(runs, key=lambda run: run["seconds"]),
        "equal_losses": sum(run["loss"] == expected for run in (first, *runs)),
        "torch_modules": max(run["torch"] for run in (first, *runs)),
        "plan_nbytes": plan.stat().st_size,
        "state_nbytes": state.stat().st_size,
        "notes": figures["notes"],
    }


def _middle(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the median run."""
    return results["runs"][len(results["runs"]) // 2]


def _stage(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda results: f"{_middle(results)[name]:.2f}"


def _seconds(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    return f"{_middle(results)['seconds']:.2f} s ({runs[0]['seconds']:.2f} to {runs[-1]['seconds']:.2f})"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "model": lambda r: f"{r['model']}, " + ("CPU target" if r["level"] is None else f"-O{r['level']}"),
    "process start to first step": _seconds,
    **{name: _stage(name) for name in _STAGES},
    "equal losses": lambda r: f"{r['equal_losses']} of {len(r['runs']) + 1}",
    "modules of torch": lambda r: str(r["torch_modules"]),
    "plan / state, MB": lambda r: f"{r['plan_nbytes'] / 1e6:.1f} / {r['state_nbytes'] / 1e6:.1f}",
}


def markdown(results: dict[str, Any]) -> str:
    """Return one line: the median run and its stages."""
    return "\n".join((*by_columns(COLUMNS, [(results,)]), "", environment.provenance(results)))


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="resnet50_batch_32", metavar="MODEL")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", type=Path, default=running.FOLDER / "resume.json", help="path of the results")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if not options.markdown:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options.model, options.level, Path(folder), cpu=options.cpu)
        environment.write(options.output, figures)
    print(markdown(environment.read(options.output)))


if __name__ == "__main__":
    main(sys.argv[1:])
