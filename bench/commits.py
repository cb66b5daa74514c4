"""Compare calls, replays and loads of the runtimes of two commits on the same plans, in alternating rounds.

    python -m bench.commits --base OTHER/runtime -o figures.json PLAN...
    python -m bench.commits --show bench/results/gpu/core_calls.json

OTHER is a checkout of the other commit. A figure is the ratio of the lowest medians, for loads that of the fastest
loads. The table has the geometric means over the plans.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from bench import environment

ROOT = Path(__file__).parent.parent
_ROUNDS, _LOADS, _WARM_UPS, _CALLS = 3, 3, 20, 150


def measure(path: str) -> dict[str, Any]:
    """Return the figures of a plan with this process's nimblert."""
    import nimblert
    from nimblert import golden
    from nimblert.plan import Target

    loads = []
    for _ in range(_LOADS - 1):
        begin = time.perf_counter()
        nimblert.load(path).close()
        loads.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    with nimblert.load(path) as model:
        loads.append(time.perf_counter() - begin)
        arrays = golden.draw_inputs(model.program, 0)
        calls: dict[str, Callable[[], object]] = {"numpy": lambda: model.run(arrays)}
        if model.plan.target is Target.CUDA:
            import torch

            locked = {name: torch.from_numpy(array).pin_memory().numpy() for name, array in arrays.items()}
            there = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
            calls["page_locked"] = lambda: model.run(locked)

            def on_device() -> None:
                model.run(there)
                torch.cuda.synchronize()

            calls["device"] = on_device
        calls["replay"] = model.replay
        found = {f"{name}_us": _times(call) for name, call in calls.items()}
    return {"plan": Path(path).stem, "load_ms": [1e3 * seconds for seconds in loads], **found}


def _times(call: Callable[[], object]) -> dict[str, float]:
    """Return the median and the minimum of calls in microseconds."""
    times = []
    for _ in range(_WARM_UPS + _CALLS):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return {"median": median(times[_WARM_UPS:]), "min": min(times[_WARM_UPS:])}


def rounds(runtimes: Mapping[str, Path], plans: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the plans in a process for each runtime and round; ``runtimes`` are folders by commit."""
    rows: list[dict[str, Any]] = []
    for number in range(1, _ROUNDS + 1):
        for commit, folder in runtimes.items():
            paths = os.pathsep.join(map(str, (folder.absolute(), ROOT)))
            command = [sys.executable, "-m", "bench.commits", "--one", *plans]
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=True, cwd=ROOT
            )
            rows += ({"round": number, "commit": commit, **row} for row in json.loads(done.stdout))
    return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures of the second commit relative to the first's, by figure and plan."""
    lowest: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        figures = {name: of["median"] for name, of in row.items() if name.endswith("_us")}
        for name, figure in {**figures, "load_ms": min(row["load_ms"])}.items():
            of_plan = lowest[name][row["plan"]]
            of_plan[row["commit"]] = min(figure, of_plan.get(row["commit"], figure))
    base, other = dict.fromkeys(row["commit"] for row in rows)
    return {name: {plan: of[other] / of[base] for plan, of in plans.items()} for name, plans in lowest.items()}


def main() -> None:
    """Measure, or show figures that were kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plans", nargs="*")
    parser.add_argument("--base", type=Path, help="the folder runtime of the other commit's checkout")
    parser.add_argument("--one", action="store_true", help="measure with the nimblert on the path, as JSON")
    parser.add_argument("--show", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps([measure(plan) for plan in options.plans]))
        return
    if options.show:
        rows = json.loads(options.show.read_text())["rows"]
    elif options.base and options.plans:
        plans = [str(Path(plan).absolute()) for plan in options.plans]
        rows = rounds({"base": options.base, environment.commit(): ROOT / "runtime"}, plans)
        if options.output:
            environment.write(options.output, {**environment.describe(), "rows": rows})
    else:
        parser.error("give --show FILE, or --base FOLDER and plans")
    for name, by_plan in ratios(rows).items():
        each = ", ".join(f"{plan} {ratio:.3f}" for plan, ratio in by_plan.items())
        print(f"{name}: {geometric_mean(by_plan.values()):.3f} ({each})")


if __name__ == "__main__":
    main()
