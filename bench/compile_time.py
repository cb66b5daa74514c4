"""Wall-clock seconds of `nimblec compile` on an idle machine: cold, and again with the caches of the first run.

Usage: python -m bench.compile_time [--markdown]; writes bench/results/gpu/compile_time.json. Cold: no timing cache, no
plan cache, no cache of Inductor's or Triton's. The ONNX file is exported from the module first, which brings torch's
files into the page cache.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import environment
from nimblec.base import installation

RESULTS = Path(__file__).parent / "results" / "gpu" / "compile_time.json"

_EXPORT = """
import sys, torch
from nimblec.pytorch.sources import import_callable
module, inputs, _ = import_callable(sys.argv[1])
torch.onnx.export(module, inputs, sys.argv[2], dynamo=False)
"""

_CACHES = ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""The environment variables that place our caches, Inductor's and Triton's."""

_STAGE = re.compile(r"^(\S.*): ([\d.]+) (ms|s)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, as a module or exported to ONNX, a level, and the number of cold compilations."""

    model: str
    exported: bool
    level: int
    repeats: int

    @property
    def name(self) -> str:
        """The row of the table."""
        return f"{self.model.removeprefix('bench.models.')}, {'ONNX' if self.exported else 'module'}, -O{self.level}"


CASES = (
    Case(model="bench.models.resnet50:fp32", exported=True, level=1, repeats=3),
    Case(model="bench.models.resnet50:fp32", exported=False, level=1, repeats=2),
    Case(model="bench.models.resnet50:fp16", exported=False, level=2, repeats=1),
)


def compile_once(model: str, case: Case, folder: Path, *flags: str) -> dict[str, Any]:
    """The seconds of one process, and those of its stages; caches are in ``folder``."""
    surroundings = installation.environment() | {name: str(folder / name) for name in _CACHES}
    command = [sys.executable, "-m", "nimblec", "compile", "-v", model, "-o", str(folder / "model.plan"), *flags]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, f"-O{case.level}", "--target", "cuda"],
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stderr)
    stages: dict[str, float] = {}
    for name, number, unit in _STAGE.findall(done.stderr):
        stages[name] = stages.get(name, 0) + float(number) / (1000 if unit == "ms" else 1)
    return {"seconds": seconds, "stages_s": stages}


def measure(case: Case) -> dict[str, Any]:
    """Cold compilations, then one with the caches of the last but its plan, and one with its plan."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), case.model
        if case.exported:
            model = str(folder / "model.onnx")
            subprocess.run([sys.executable, "-c", _EXPORT, case.model, model], check=True, capture_output=True)
        cold = []
        for number in range(case.repeats):
            caches = folder / str(number)
            caches.mkdir()
            cold.append(compile_once(model, case, caches))
        result = {"cold": cold, "warm": [compile_once(model, case, caches, "--no-plan-cache")]}
        if case.exported:
            result["kept"] = [compile_once(model, case, caches)]
        return result


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/measured.md."""
    rows = [
        "| model | cold, s | again without the plan cache, s | again, s |",
        "|---|---|---|---|",
    ]
    for name, figures in results["cases"].items():
        cells = (", ".join(f"{run['seconds']:.1f}" for run in figures.get(k, ())) for k in ("cold", "warm", "kept"))
        rows.append(f"| {name} | {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join([*rows, "", environment.provenance(results)])


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    if parser.parse_args(arguments).markdown:
        print(markdown(environment.read(RESULTS)))
        return
    results: dict[str, Any] = {"cores": os.cpu_count(), "cases": {}}
    for case in CASES:
        results["cases"][case.name] = measure(case)
        environment.write(RESULTS, results)
    print(markdown(environment.read(RESULTS)))


if __name__ == "__main__":
    main(sys.argv[1:])
