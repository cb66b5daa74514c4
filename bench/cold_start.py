"""Time from process start to the first output: a plan in nimblert, and the same model in torch.

Usage: python -m bench.cold_start [--markdown] [MODEL]; writes bench/results/gpu/cold_start.json. Nothing else should
run at the same time.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from nimblec.base.options import Options
from nimblec.compiler import compile_model
from nimblert.check.verify import read_plan

RESULTS = Path(__file__).parent / "results" / "gpu" / "cold_start.json"
_REPEATS = 7

_LEAN = """
import resource, sys, numpy as np, nimblert
with nimblert.load(sys.argv[1]) as model:
    inputs = {t.name: np.load(sys.argv[2]) for t in model.inputs}
    outputs = model.run(inputs)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

_TORCH = """
import resource, sys, numpy as np, torch
from nimblec.pytorch.sources import import_callable
module, (example,), _ = import_callable(sys.argv[1])
module = module.cuda()
x = torch.from_numpy(np.load(sys.argv[2])).cuda()
with torch.no_grad():
    module(x).cpu()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _run(code: str, *arguments: str) -> tuple[float, float]:
    """Seconds that a process takes, and its peak resident memory in MiB."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, int(done.stdout.split()[-1]) / 1024


def measure(spec: str, folder: Path) -> dict[str, Any]:
    """Several starts of both; the first of each, with cold files, is left out."""
    path, array = folder / "model.plan", folder / "x.npy"
    options = Options(target="cuda", level=0, plan_cache=None)
    made = compile_model(spec, options=options, output=path, observer=lambda *_: None)
    plan = read_plan(path)
    (tensor,) = plan.programs[0].inputs
    np.save(array, np.random.default_rng(0).standard_normal(tensor.shape, np.float32).astype(tensor.dtype))
    lean = [_run(_LEAN, str(path), str(array)) for _ in range(_REPEATS + 1)][1:]
    torch = [_run(_TORCH, spec, str(array)) for _ in range(3)][1:]
    code, weights = sum(m.code.nbytes for m in plan.modules), plan.weights_nbytes
    return {
        "model": spec,
        "lean_s": sorted(s for s, _ in lean),
        "lean_resident_mib": max(m for _, m in lean),
        "torch_s": sorted(s for s, _ in torch),
        "torch_resident_mib": max(m for _, m in torch),
        "plan_nbytes": {"code": code, "weights": weights, "metadata": path.stat().st_size - code - weights},
        "stages_s": dict(made.stages),
    }


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/measured.md."""
    lean, torch = (float(np.median(results[k])) for k in ("lean_s", "torch_s"))
    sizes = {name: nbytes / 1e6 for name, nbytes in results["plan_nbytes"].items()}
    return "\n".join([
        f"| {results['model'].removeprefix('bench.models.')} | nimblert | torch |",
        "|---|---|---|",
        f"| process start to first output | {lean:.2f} s | {torch:.2f} s |",
        "| resident memory | {lean_resident_mib:.0f} MiB | {torch_resident_mib:.0f} MiB |".format(**results),
        "",
        "Plan: " + ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()) + ".",
        "Compiled in " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in results["stages_s"].items()) + ".",
        "",
        environment.provenance(results),
    ])


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bench.models.resnet50:fp32", metavar="MODEL")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if not options.markdown:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options.model, Path(folder))
        environment.write(RESULTS, figures)
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main(sys.argv[1:])
