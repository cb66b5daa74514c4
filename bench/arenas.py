"""Device memory of ten plans that share one arena, compared with an arena for each plan.

Usage: python -m bench.arenas [--markdown] [--level 0] [--workers 10] [MODEL_OR_PLAN ...]: plan files, or models named
package.module:callable, compiled first for one stream. Writes arenas.json in bench/results/gpu, or --output. Nothing
else may use the GPU meanwhile, for one to two minutes on an H200. --cpu tries the program on the CPU target.

Memory is the driver's (on the CPU target, the process's anonymous memory), before and after each load and after two
runs; CUDA's context comes from nvidia-smi. Outputs on one arena must equal those with an arena of their own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.compiling import plan_of
from bench.memory import held
from bench.running import FOLDER, short
from bench.tables import by_columns, mib, number
from nimblec.base.difference import difference
from nimblert import golden
from nimblert.arena import Arena
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.executable import Executable
from nimblert.loading import load
from nimblert.plan import Plan, Target

NETWORKS = (
    *("resnet50", "resnet101", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("densenet121", "convnext_tiny", "vit_b_16", "bert_base", "unet"),
)

Outputs = dict[str, list[dict[str, np.ndarray]]]
"""The outputs of each run of each plan."""


def plans(asked: Sequence[str], folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """Return the plan files by name; compile models in ``folder``."""
    level, workers = (None, 1) if options.cpu else (options.level, options.workers)
    compile_one = partial(plan_of, level=level, streams="1")
    paths = [folder / f"{number}.plan" for number in range(len(asked))]
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(map(short, asked), pool.map(compile_one, asked, paths), strict=True))


def described(plan: Plan) -> dict[str, int]:
    """Return the bytes that a plan declares."""
    return {
        "weights": plan.weights_nbytes,
        "arena": plan.arena_nbytes,
        "arrays": sum(sum(p.input_nbytes) + sum(p.output_nbytes) for p in plan.programs),
        "code": sum(module.code.nbytes for module in plan.modules),
    }


def _used(plan: Plan) -> int:
    """Return the bytes of the device in use; on the CPU target, those of the process."""
    found = held(plan)
    return found.get("device", found["anonymous"])


def together(paths: Mapping[str, Path], *, shared: bool) -> tuple[dict[str, Any], Outputs]:
    """Load plans at the same time, each with its own arena or all on one; return the bytes taken, and the outputs."""
    look = partial(_used, read_plan(next(iter(paths.values()))))
    start = look()
    rows: dict[str, dict[str, int]] = {}
    models: dict[str, Executable] = {}
    with ExitStack() as opened:
        arena = opened.enter_context(Arena.for_plans(*paths.values())) if shared else None
        figures: dict[str, Any] = {"plans": rows, "arena": look() - start}
        outputs: Outputs = {}
        for name, path in paths.items():
            before = look()
            models[name] = opened.enter_context(load(path, arena=arena))
            rows[name] = {"loaded": look() - before}
            outputs[name] = [_run(models[name])]
            rows[name]["after_runs"] = look() - before
        for name, model in models.items():
            outputs[name].append(_run(model))
        figures["all"] = look() - start
    return {**figures, "left": look() - start}, outputs


def _run(model: Executable) -> dict[str, np.ndarray]:
    return model.run(golden.draw_inputs(model.program, 0))


def measure(paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the memory of all plans with arenas of their own, and on one."""
    parsed = {name: read_plan(path) for name, path in paths.items()}
    with ExitStack() as opened:
        before = _gpu_nbytes()
        if any(plan.target is Target.CUDA for plan in parsed.values()):
            driver.initialise()
            opened.callback(driver.Context().close)
        after = _gpu_nbytes()
        own, alone = together(paths, shared=False)
        shared, beside = together(paths, shared=True)
    return {
        "context": None if before is None or after is None else after - before,
        "plans": {name: described(plan) for name, plan in parsed.items()},
        "own": own,
        "shared": shared,
        "wrong": sorted(name for name in paths if not _agree(parsed[name], [*alone[name], *beside[name]])),
    }


def _agree(plan: Plan, outputs: Sequence[Mapping[str, np.ndarray]]) -> bool:
    """Return whether all runs agree: bit for bit, or within the tolerance of a framework that is not deterministic."""
    recorded = plan.programs[0].golden
    tolerance = recorded.tolerance if recorded else 0.0
    return all(
        difference(array, one[name]).within(tolerance) for one in outputs for name, array in outputs[0].items()
    )


def _gpu_nbytes() -> int | None:
    """Return the bytes in use on the first GPU, from nvidia-smi; None without it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20
    except (FileNotFoundError, subprocess.CalledProcessError, ValueError):
        return None


def _declared(kind: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, results: mib(results["plans"][name][kind])


def _taken(way: str, when: str) -> Callable[[str, Mapping[str, Any]], str]:
    return lambda name, results: mib(results[way]["plans"][name][when])


COLUMNS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "plan": lambda name, _: name,
    "weights": _declared("weights"),
    "arena": _declared("arena"),
    "inputs and outputs": _declared("arrays"),
    "code": _declared("code"),
    "loaded, with an arena of its own": _taken("own", "loaded"),
    "loaded, on one arena": _taken("shared", "loaded"),
    "after runs: of its own / on one": lambda name, results: " / ".join(
        _taken(way, "after_runs")(name, results) for way in ("own", "shared")
    ),
}


def markdown(results: dict[str, Any]) -> str:
    """Return a line for each plan, in MiB, and a paragraph on all of them."""
    lines = by_columns(COLUMNS, ((name, results) for name in results["plans"]))
    plans, shared = results["plans"].values(), results["shared"]
    sums = {kind: sum(plan[kind] for plan in plans) for kind in ("weights", "arena", "arrays", "code")}
    arena = max(plan["arena"] for plan in plans)
    told = {kind: mib(nbytes) for kind, nbytes in sums.items()}
    ratio = number(shared["all"] / (sums["weights"] + arena), 3)
    wrong = f"Wrong: {', '.join(results['wrong'])}" if results["wrong"] else "All outputs are those of each plan alone"
    below = (
        f"In MiB. On one arena all plans take {mib(shared['all'])}, {ratio} times their "
        f"weights and the largest arena ({told['weights']} + {mib(arena)}); besides, inputs and outputs are "
        f"{told['arrays']}, code {told['code']}. With arenas of their own, together {told['arena']}, they take "
        f"{mib(results['own']['all'])}. CUDA's context takes {mib(results['context'])} once; closed, plans leave "
        f"{mib(shared['left'])}. {wrong}."
    )
    return "\n".join([*lines, "", below, environment.provenance(results)])


def main(arguments: Sequence[str]) -> int:
    """Measure, or print the table of the results; return 1 if any output was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL_OR_PLAN")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--workers", type=int, default=10, help="compilations side by side")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", type=Path, default=FOLDER / "arenas.json", help="path of the results")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if not options.markdown:
        asked = options.models or [f"bench.models.{name}:fp16" for name in NETWORKS]
        with tempfile.TemporaryDirectory() as folder:
            environment.write(options.output, measure(plans(asked, Path(folder), options)))
    results = environment.read(options.output)
    print(markdown(results))
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
