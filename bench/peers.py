"""nimblec and torch's modes side by side, one model after another, each in a process of its own.

Usage: python -m bench.peers [--markdown] [--modes eager,graph,compile,freeze,autotune] [--levels 0,1]
[MODEL ...], a model being package.module:callable. Writes bench/results/h200/peers.json after each model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.schedules import gpu_time
from bench.torch_peer import MODES
from nimblec.compiler import compile_model
from nimblec.options import Options
from nimblert import container, golden
from nimblert.executable import load

RESULTS = Path(__file__).parent / "results" / "h200" / "peers.json"
MODELS = (
    "bench.models.resnet50:fp16",
    "bench.models.mobilenet_v2:fp16",
    "bench.models.inception_v3:fp16",
    "bench.models.googlenet:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.gpt2:bf16",
)
_REPEATS = 200


def ours(spec: str, level: int) -> dict[str, Any]:
    """Compile at a level and measure replays on inputs that the GPU holds, as the peers' are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.plan"
        made = compile_model(spec, options=Options(target="cuda", level=level), output=path, observer=lambda *_: None)
        plan = container.read(path)
        with load(plan) as loaded:
            loaded.run(golden.draw_inputs(plan.programs[0], 0))
            wall = []
            for _ in range(_REPEATS):
                begin = time.perf_counter()
                loaded.replay()
                wall.append((time.perf_counter() - begin) * 1e6)
        return {
            "wall_us": float(np.median(wall)),
            "gpu_us": gpu_time(plan)["median"],
            "prepare_s": sum(seconds for _, seconds in made.stages),
            "commands": len(plan.programs[0].commands),
            "notes": made.notes,
        }


def peer(spec: str, mode: str) -> dict[str, Any]:
    """One of torch's modes; what it said last where it failed."""
    command = [sys.executable, "-m", "bench.torch_peer", mode, spec]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr.strip().splitlines()[-1:]}


def markdown(results: dict[str, Any]) -> str:
    """Wall microseconds of a synchronised call, and the ratio of torch's fastest mode to our fastest level."""
    names = list(next(iter(results["models"].values())))
    lines = ["| model | " + " | ".join(names) + " | torch's best / ours |", "|---" * (len(names) + 2) + "|"]
    for spec, figures in results["models"].items():
        walls = {name: found.get("wall_us", float("nan")) for name, found in figures.items()}
        mine = min(wall for name, wall in walls.items() if name.startswith("-O"))
        best = np.nanmin([wall for name, wall in walls.items() if not name.startswith("-O")])
        cells = " | ".join(f"{wall:.0f}" for wall in walls.values())
        lines.append(f"| {spec.removeprefix('bench.models.')} | {cells} | {best / mine:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--modes", default="eager,graph,compile,freeze")
    parser.add_argument("--levels", default="0,1")
    parser.add_argument("models", nargs="*")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(environment.read(RESULTS)))
        return
    results: dict[str, Any] = {"models": {}}
    modes = [mode for mode in MODES if mode in arguments.modes.split(",")]
    for spec in arguments.models or MODELS:
        figures = {mode: peer(spec, mode) for mode in modes}
        figures |= {f"-O{level}": ours(spec, int(level)) for level in arguments.levels.split(",")}
        results["models"][spec] = figures
        environment.write(RESULTS, results)
        print(spec, json.dumps(figures), flush=True)
    print(markdown(results))


if __name__ == "__main__":
    main()
