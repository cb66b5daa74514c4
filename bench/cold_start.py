"""Time from process start to the first output: a plan, torch.compile with warm caches, a .pt2, and ONNX Runtime.

Usage: python -m bench.cold_start [--markdown] [--cpu] [--level N] [--output FILE] [MODEL ...]; MODEL is
package.module:callable. Writes bench/results/gpu/cold_start.json, with --cpu bench/results/cpu/cold_start.json.

Every process loads files that an earlier one has written: the plan; a module pickled with its weights, which
torch.compile compiles with the caches of Inductor in place; a package of AOTInductor with freezing; the ONNX file that
torch exports (--cpu alone). A first process, which is not counted, writes bytecode and caches. Bytecode is written even
where PYTHONDONTWRITEBYTECODE is set. Systems write their files side by side, and start one at a time (bench/turns.py).

"seconds" runs from before a process starts until its output is an array on the host, in the stages "python", "import",
"load" and "run"; "load_ms" are those of a plan's load, as `nimblec run --profile-load` prints them. A plan's process
imports numpy within the load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench import compiling, environment, running
from bench.running import short
from bench.tables import by_columns
from bench.turns import Result, Turn, measured

MODELS = ("bench.models.resnet50:fp16", "bench.models.resnet50:fp32", "bench.models.llama_decoder:bf16")
_STAGES = ("python", "import", "load", "run")

_BEGIN = """
import time
times = [time.perf_counter()]
def after():
    times.append(time.perf_counter())
import json, sys
path, inputs = sys.argv[1:]
stages = []
"""
_END = """
after()
import numpy as np
print(json.dumps({"times": times, "output": float(np.asarray(first, np.float64).ravel()[0]), "stages": stages}))
"""
_SYSTEMS = {
    "nimblec": """
import nimblert
from nimblert import stages as kept
stages = kept.kept = []
after()
model = nimblert.load(path)
after()
import numpy as np
first = model(*np.load(inputs).values())
first = first[0] if isinstance(first, tuple) else first
""",
    "torch.compile": """
import torch
after()
module, args = torch.load(path, weights_only=False, mmap=True)
module = module.cuda() if torch.cuda.is_available() else module
after()
with torch.no_grad():
    first = torch.compile(module)(*(arg.cuda() if torch.cuda.is_available() else arg for arg in args))
first = torch.utils._pytree.tree_leaves(first)[0].float().cpu()
""",
    "AOTInductor": """
import torch
from torch._inductor import aoti_load_package
after()
module, args = aoti_load_package(path), torch.load(inputs)
after()
first = module(*(arg.cuda() if torch.cuda.is_available() else arg for arg in args))
first = torch.utils._pytree.tree_leaves(first)[0].float().cpu()
""",
    "ONNX Runtime": """
import numpy as np, onnxruntime
after()
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
after()
names = [place.name for place in session.get_inputs()]
first = session.run(None, dict(zip(names, np.load(inputs).values())))[0]
""",
}


def started(system: str, path: Path, inputs: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of one fresh process: the seconds of its stages, and the first number that it computes."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    begin = time.perf_counter()  # on Linux the same clock in every process
    command = [sys.executable, "-c", _BEGIN + _SYSTEMS[system] + _END, str(path), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        return {"problem": done.stderr.strip().rpartition("\n")[2] or f"ended with status {done.returncode}"}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = [begin, *said.pop("times")]
    load_ms = [[name, *(round((moment - times[2]) * 1e3, 1) for moment in when)] for name, *when in said.pop("stages")]
    return {
        **said,
        "seconds": times[-1] - begin,
        **{name: after - before for name, before, after in zip(_STAGES, times, times[1:], strict=False)},
        "load_ms": load_ms,
    }


def written(system: str, model: str, level: int | None, folder: Path) -> tuple[Path, Path]:
    """Write what a process of a system loads, and its inputs; return both paths."""
    import torch

    from bench import reference

    module, args, kwargs = reference.seeded(model)
    assert not kwargs
    inputs, device = folder / "inputs", "cpu" if level is None else "cuda"
    if system in {"nimblec", "ONNX Runtime"}:
        with inputs.open("wb") as file:
            np.savez(file, *(tensor.numpy() for tensor in args))
    else:
        torch.save(args, inputs)
    path = folder / "model"
    with torch.no_grad():
        if level is None and system in {"nimblec", "ONNX Runtime"}:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(module, args, path.with_suffix(".onnx"), dynamo=True, verbose=False)
            model = str(path.with_suffix(".onnx"))
        if system == "ONNX Runtime":
            path = Path(model)
        elif system == "nimblec":
            path = path.with_suffix(".plan")
            compiling.compiled(model, compiling.options(folder, level), path)
        elif system == "torch.compile":
            torch.save((module, args), path)
        else:
            from torch._inductor import aoti_compile_and_package

            path = path.with_suffix(".pt2")
            program = torch.export.export(module.to(device), tuple(arg.to(device) for arg in args))
            aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})
    return path, inputs


def measure(system: str, model: str, level: int | None, repeats: int) -> None:
    """Report the figures of ``repeats`` starts, from quick to slow, after one that is not counted."""
    turn = Turn(wait=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, inputs = written(system, model, level, folder)
        nbytes = sum(file.stat().st_size for file in folder.glob(f"{path.name}*"))
        runs = [started(system, path, inputs, folder)]
        turn.begin()
        runs += [started(system, path, inputs, folder) for _ in range(repeats)]
    if problem := next((run["problem"] for run in runs if "problem" in run), None):
        turn.report(problem=problem)
    else:
        turn.report(runs=sorted(runs[1:], key=lambda run: run["seconds"]), nbytes=nbytes)
    turn.end()


def _middle(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    return figures["runs"][len(figures["runs"]) // 2]


def _stage(name: str) -> Callable[[str, str, Mapping[str, Any]], str]:
    return lambda _, __, figures: f"{_middle(figures)[name]:.3f}"


def _seconds(_: str, __: str, figures: Mapping[str, Any]) -> str:
    runs = figures["runs"]
    return f"{_middle(figures)['seconds']:.3f} ({runs[0]['seconds']:.3f} to {runs[-1]['seconds']:.3f})"


COLUMNS: dict[str, Callable[[str, str, Mapping[str, Any]], str]] = {
    "model": lambda model, _, __: short(model),
    "system": lambda _, system, __: system,
    "process start to first output, s": _seconds,
    **{name: _stage(name) for name in _STAGES},
    "files, MB": lambda _, __, figures: f"{figures['nbytes'] / 1e6:.1f}",
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each model and system, with the medians of the stages."""
    found = [(model, system, f) for model, systems in results["starts"].items() for system, f in systems.items()]
    rows = [row for row in found if "problem" not in row[2]]
    failed = [f"{short(model)}, {system}: {f['problem']}" for model, system, f in found if "problem" in f]
    below = [*failed, ""] if failed else []
    return "\n".join((*by_columns(COLUMNS, rows), "", *below, environment.provenance(results)))


def main(arguments: list[str]) -> None:
    """Measure, or print the table of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--systems", default=",".join(_SYSTEMS), help="those to measure, separated by commas")
    parser.add_argument("--output", type=Path, help="path of the results")
    parser.add_argument("--limit-s", type=float, default=3600, help="time after which no figure is waited for")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        model, system = options.one
        measure(system, model, None if options.cpu else options.level, options.repeats)
        return
    folder = running.FOLDER.with_name("cpu") if options.cpu else running.FOLDER
    output = options.output or folder / "cold_start.json"
    if not options.markdown:
        given = ["--level", str(options.level), "--repeats", str(options.repeats), *(["--cpu"] if options.cpu else [])]
        systems = [name for name in options.systems.split(",") if options.cpu or name != "ONNX Runtime"]
        pairs = [(model, system) for model in options.models for system in systems]
        level = "" if options.cpu else f" -O{options.level}"
        starts: dict[str, dict[str, Result]] = {model + level: {} for model in options.models}
        for (model, system), result in measured("bench.cold_start", given, pairs, limit_s=options.limit_s).items():
            starts[model + level][system] = {"problem": result["failed"]} if "failed" in result else result
        environment.write(output, {"starts": starts})
    print(markdown(environment.read(output)))


if __name__ == "__main__":
    main(sys.argv[1:])
