"""Time from process start to the first training step of a plan that resumes from a saved state, without PyTorch.

Usage: python -m bench.resume [--markdown] [--level N] [--cpu] [--output FILE] [MODEL], a model being NETWORK_batch_N of
bench.models.cifar_training; writes bench/results/gpu/resume.json. Nothing else should run at the same time. --cpu uses
the CPU target, to try the program.

A plan takes some steps, saves its state as safetensors, and takes one more, whose loss the fresh processes must repeat.
seconds: from before a process starts until it has that loss; the stages are "python" until its first line, "import" of
numpy and nimblert, "load" of the plan, "state" from the file, and "step". The processes find bytecode, as those of an
installation do: the first one, which is not among the runs, writes what is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.models import cifar_training
from bench.tables import header, row
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblert.executable import load

RESULTS = Path(__file__).parent / "results" / "gpu" / "resume.json"
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
    """The figures of one fresh process: seconds of its stages, loss, and imported modules of torch."""
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
    """Several starts; the first, with cold files, is kept separately."""
    plan, state, batch = (folder / name for name in ("train.plan", "state.safetensors", "batch.npz"))
    options = Options(target="cpu" if cpu else "cuda", level=None if cpu else level, plan_cache=None)
    spec = f"{cifar_training.__name__}:{model}"
    made = compile_model(spec, options=options, output=plan, observer=lambda *_: None)
    network, count, _ = cifar_training.split(model)
    arrays = [tensor.numpy() for tensor in cifar_training.parts(network, count)[2]]
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
        "notes": made.notes,
    }


def markdown(results: dict[str, Any]) -> str:
    """One line: the median run and its stages."""
    runs = results["runs"]
    middle = runs[len(runs) // 2]
    head = ["model", "process start to first step", *_STAGES, "equal losses", "modules of torch", "plan / state, MB"]
    level = "CPU target" if results["level"] is None else f"-O{results['level']}"
    sizes = " / ".join(f"{results[f'{name}_nbytes'] / 1e6:.1f}" for name in ("plan", "state"))
    cells = [
        f"{results['model']}, {level}",
        f"{middle['seconds']:.2f} s ({runs[0]['seconds']:.2f} to {runs[-1]['seconds']:.2f})",
        *(f"{middle[name]:.2f}" for name in _STAGES),
        f"{results['equal_losses']} of {len(runs) + 1}",
        str(results["torch_modules"]),
        sizes,
    ]
    return "\n".join((*header(head), row(cells), "", environment.provenance(results)))


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="resnet50_batch_32", metavar="MODEL")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="path of the results")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if not options.markdown:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options.model, options.level, Path(folder), cpu=options.cpu)
        environment.write(options.output, figures)
    print(markdown(environment.read(options.output)))


if __name__ == "__main__":
    main(sys.argv[1:])
