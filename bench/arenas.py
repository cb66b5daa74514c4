"""Device memory of ten plans that share one arena, compared with an arena for each plan.

Usage: python -m bench.arenas [--markdown] [--level 0] [--workers 10] [MODEL_OR_PLAN ...]: plan files, or models named
package.module:callable, which are first compiled in parallel, for one stream. Writes arenas.json in bench/results/gpu,
or --output; --markdown prints its table. Nothing else may use the GPU meanwhile. On one H200 it is expected to take one
to two minutes. --cpu compiles the models for the CPU target, to try the program.

Memory is what the driver reports as used (on the CPU target, the anonymous memory of the process), before and after
each load, and after runs, for which the driver loads code and graphs are built. All plans take turns, and their outputs
on one arena must equal those with their own. The size of CUDA's context, one for the process, comes from nvidia-smi.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from bench.compiling import plan_of
from bench.memory import held
from bench.peers import FOLDER
from bench.running import short
from bench.tables import header, mib, number, row
from nimblec.base.difference import difference
from nimblert import golden
from nimblert.arena import Arena
from nimblert.check.verify import read_plan
from nimblert.cuda import driver
from nimblert.executable import Executable, load
from nimblert.plan import Plan, Target

NETWORKS = (
    *("resnet50", "resnet101", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("densenet121", "convnext_tiny", "vit_b_16", "bert_base", "unet"),
)
MODELS = tuple(f"bench.models.{name}:fp16" for name in NETWORKS)
ROUNDS = 1
"""Runs of each plan once all are loaded: a third run from the host would build a graph that uploads its inputs."""
_HEAD = (
    "plan",
    "weights",
    "arena",
    "inputs and outputs",
    "code",
    "loaded, with an arena of its own",
    "loaded, on one arena",
    "after runs: of its own / on one",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="*", metavar="MODEL_OR_PLAN")
    made.add_argument("--level", type=int, default=0)
    made.add_argument("--workers", type=int, default=10, help="compilations side by side")
    made.add_argument("--cpu", action="store_true")
    made.add_argument("--output", type=Path, help="path of the results")
    made.add_argument("--markdown", action="store_true")
    return made


def plans(asked: Sequence[str], folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The plan files by name; models are compiled in ``folder``."""
    target, workers = ("cpu", 1) if options.cpu else ("cuda", options.workers)
    compile_one = partial(plan_of, target=target, level=options.level, streams="1")
    paths = [folder / f"{number}.plan" for number in range(len(asked))]
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(map(short, asked), pool.map(compile_one, asked, paths), strict=True))


def described(plan: Plan) -> dict[str, int]:
    """The bytes that a plan declares."""
    return {
        "weights": plan.weights_nbytes,
        "arena": plan.arena_nbytes,
        "arrays": sum(sum(p.input_nbytes) + sum(p.output_nbytes) for p in plan.programs),
        "code": sum(module.code.nbytes for module in plan.modules),
    }


def used(plan: Plan) -> int:
    """Bytes of the device in use; on the CPU target, those of the process."""
    found = held(plan)
    return found.get("device", found["anonymous"])


class Together:
    """Plans that are loaded at the same time, each with its own arena or all on one."""

    def __init__(self, paths: Mapping[str, Path], *, shared: bool) -> None:
        self._paths = paths
        self._shared = shared
        self._look = partial(used, read_plan(next(iter(paths.values()))))

    def measured(self) -> tuple[dict[str, Any], dict[str, list[dict[str, np.ndarray]]]]:
        """The bytes taken, in total and by plan, and the outputs of each plan's runs."""
        start = self._look()
        rows: dict[str, dict[str, int]] = {}
        figures: dict[str, Any] = {"plans": rows}
        with ExitStack() as opened:
            arena = opened.enter_context(Arena.for_plans(*self._paths.values())) if self._shared else None
            figures["arena"] = self._look() - start
            models: dict[str, Executable] = {}
            outputs: dict[str, list[dict[str, np.ndarray]]] = {}
            for name, path in self._paths.items():
                before = self._look()
                models[name] = opened.enter_context(load(path, arena=arena))
                rows[name] = {"loaded": self._look() - before}
                outputs[name] = [_run(models[name])]
                rows[name]["after_runs"] = self._look() - before
            for _ in range(ROUNDS):
                for name, model in models.items():
                    outputs[name].append(_run(model))
            figures["all"] = self._look() - start
        return {**figures, "left": self._look() - start}, outputs


def _run(model: Executable) -> dict[str, np.ndarray]:
    return model.run(golden.draw_inputs(model.program, 0))


def measure(paths: Mapping[str, Path]) -> dict[str, Any]:
    """The memory of all plans with arenas of their own, and on one."""
    parsed = {name: read_plan(path) for name, path in paths.items()}
    with ExitStack() as opened:
        before = _gpu_nbytes()
        if any(plan.target is Target.CUDA for plan in parsed.values()):
            driver.initialise()
            opened.callback(driver.Context().close)
        after = _gpu_nbytes()
        own, alone = Together(paths, shared=False).measured()
        shared, together = Together(paths, shared=True).measured()
    return {
        "context": None if before is None or after is None else after - before,
        "plans": {name: described(plan) for name, plan in parsed.items()},
        "own": own,
        "shared": shared,
        "wrong": sorted(name for name in paths if not _agree(parsed[name], [*alone[name], *together[name]])),
    }


def _agree(plan: Plan, outputs: Sequence[Mapping[str, np.ndarray]]) -> bool:
    """Whether all runs agree: bit for bit, or within the tolerance of a framework that is not deterministic."""
    recorded = plan.programs[0].golden
    tolerance = recorded.tolerance if recorded else 0.0
    return all(
        difference(array, one[name]).within(tolerance) for one in outputs for name, array in outputs[0].items()
    )


def _gpu_nbytes() -> int | None:
    """Bytes in use on the first GPU, from nvidia-smi; None without it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20
    except (FileNotFoundError, subprocess.CalledProcessError, ValueError):
        return None


def markdown(results: dict[str, Any]) -> str:
    """A line for each plan, in MiB, and a paragraph on all of them."""
    lines = header(_HEAD)
    own, shared = results["own"], results["shared"]
    for name, plan in results["plans"].items():
        ways = own["plans"][name], shared["plans"][name]
        told = (plan[kind] for kind in ("weights", "arena", "arrays", "code"))
        after = " / ".join(mib(way["after_runs"]) for way in ways)
        lines.append(row([name, *map(mib, told), *(mib(way["loaded"]) for way in ways), after]))
    return "\n".join([*lines, "", _together(results), environment.provenance(results)])


def _together(results: Mapping[str, Any]) -> str:
    plans, shared = results["plans"].values(), results["shared"]
    sums = {kind: sum(plan[kind] for plan in plans) for kind in ("weights", "arena", "arrays", "code")}
    arena = max(plan["arena"] for plan in plans)
    told = {kind: mib(nbytes) for kind, nbytes in sums.items()}
    least = sums["weights"] + arena
    wrong = f"wrong: {', '.join(results['wrong'])}" if results["wrong"] else "all outputs are those of each plan alone"
    return (
        f"In MiB. On one arena all plans take {mib(shared['all'])}, {number(shared['all'] / least, 3)} times their "
        f"weights and the largest arena ({told['weights']} + {mib(arena)}); besides, inputs and outputs are "
        f"{told['arrays']}, code {told['code']}. With arenas of their own, together {told['arena']}, they take "
        f"{mib(results['own']['all'])}. CUDA's context takes {mib(results['context'])} once; closed, plans leave "
        f"{mib(shared['left'])}. {wrong[0].upper()}{wrong[1:]}."
    )


def main(arguments: Iterable[str]) -> int:
    """Measure, or print the table of the results; 1 if any output was wrong."""
    options = parser().parse_args([*arguments])
    path = options.output or FOLDER / "arenas.json"
    if not options.markdown:
        with tempfile.TemporaryDirectory() as folder:
            environment.write(path, measure(plans(options.models or MODELS, Path(folder), options)))
    results = environment.read(path)
    print(markdown(results))
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
