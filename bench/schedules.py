"""What the schedule is worth: the same kernels in the captured order and as `auto` chose.

Usage: python -m bench.schedules [--markdown] [-O0|-O1|-O2] [MODEL ...], a model being package.module:callable.
Writes bench/results/h200/schedules.json (on an H200), or prints its table with --markdown.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment
from nimblec.compiler import compile_model
from nimblec.options import Options
from nimblert import container, golden
from nimblert.cuda import CudaBackend
from nimblert.executable import load
from nimblert.hazards import hazards
from nimblert.plan import Launch, Plan, Record, Wait

RESULTS = Path(__file__).parent / "results" / "h200" / "schedules.json"
MODELS = (
    "bench.models.inception_v3:fp16",
    "bench.models.nasnet_a_large:fp32",
    "bench.models.googlenet:fp16",
    "bench.models.pnasnet_5_large:fp32",
    "bench.models.two_towers:fp16",
    "bench.models.bert_base:fp16",
    "bench.models.gpt2:bf16",
    "bench.models.resnet50:fp32",
)


def serialised(plan: Plan) -> Plan:
    """The same kernels in the same memory on one stream, in issue order."""
    (program,) = plan.programs
    work = tuple(
        replace(c, stream=0, programmatic=False) if isinstance(c, Launch) else replace(c, stream=0)
        for c in program.commands
        if not isinstance(c, Record | Wait)
    )
    return replace(plan, programs=(replace(program, commands=work, stream_count=1, event_count=0, schedule=None),))


def gpu_time(plan: Plan) -> dict[str, float]:
    """GPU microseconds of a run on random inputs."""
    with load(plan) as loaded:
        assert isinstance(loaded.backend, CudaBackend)
        loaded.run(golden.draw_inputs(plan.programs[0], 0))
        loaded.backend.time(50)
        return _spread(loaded.backend.time(200))


def measure(spec: str, folder: Path, level: int) -> dict[str, Any]:
    """Compile one model with ``auto`` and measure it, bit-exactness and torch's own graph included."""
    path = folder / "model.plan"
    options = Options(target="cuda", level=level, plan_cache=None)
    made = compile_model(spec, options=options, output=path, observer=lambda *_: None)
    plan = container.read(path)
    (program,) = plan.programs
    record = program.schedule
    assert record is not None
    with load(plan) as loaded:
        outputs = list(loaded.run(golden.draw_inputs(program, 0)).values())
        exact = golden.record(0, outputs, 0.0).outputs == program.golden.outputs
        wall = []
        for _ in range(200):
            begin = time.perf_counter()
            loaded.replay()
            wall.append((time.perf_counter() - begin) * 1e6)
    command = [sys.executable, "-m", "bench.torch_peer", "graph", spec]
    peer = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "bit_exact": exact,
        "hazards": sum(1 for _ in hazards(program)),
        "commands": len(program.commands),
        "streams": program.stream_count,
        "events": program.event_count,
        "policy": record.policy,
        "antichain": len(record.antichain),
        "fewest_syncs": record.fewest_sync_count,
        "candidates": {
            c.policy: [c.stream_count, c.sync_count, c.arena_nbytes, c.duration_ns] for c in record.candidates
        },
        "arena_nbytes": program.arena_nbytes,
        "arena_lower_bound_nbytes": record.arena_lower_bound_nbytes,
        "gpu_us": gpu_time(plan),
        "chain_gpu_us": gpu_time(serialised(plan)),
        "wall_us": _spread(np.array(wall)),
        "torch": json.loads(peer.stdout) if peer.returncode == 0 else peer.stderr.strip().splitlines()[-1],
        "stages_s": {name: round(seconds, 3) for name, seconds in made.stages},
        "notes": made.notes,
        "code_nbytes": sum(m.code.nbytes for m in plan.modules),
        "weights_nbytes": plan.weights_nbytes,
        "file_nbytes": path.stat().st_size,
    }


def _spread(times: np.ndarray) -> dict[str, float]:
    p5, median, p95 = np.percentile(times, (5, 50, 95))
    return {"p5": round(float(p5), 2), "median": round(float(median), 2), "p95": round(float(p95), 2)}


def markdown(results: dict[str, Any]) -> str:
    """The table of the README."""
    lines = [
        "| model | chain, us | auto, us | gain | policy | streams / syncs | arena / bound | torch's graph pool |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for spec, r in results["models"].items():
        chain, chosen = r["chain_gpu_us"]["median"], r["gpu_us"]["median"]
        pool = r["torch"]["graph_pool_nbytes"] / 2**20 if isinstance(r["torch"], dict) else float("nan")
        lines.append(
            f"| {spec.removeprefix('bench.models.')} | {chain:.0f} | {chosen:.0f} | {chain / chosen:.2f} "
            f"| {r['policy']} | {r['streams']} / {r['candidates'][r['policy']][1]} | {r['arena_nbytes'] / 2**20:.1f} / "
            f"{r['arena_lower_bound_nbytes'] / 2**20:.1f} MiB | {pool:.1f} MiB |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure the models named, or all."""
    level = next((int(a[2:]) for a in arguments if a.startswith("-O")), 0)
    path = RESULTS.with_stem(f"schedules-O{level}") if level else RESULTS
    if "--markdown" in arguments:
        print(markdown(environment.read(path)))
        return
    results: dict[str, Any] = {"models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for spec in [a for a in arguments if not a.startswith("-")] or MODELS:
            results["models"][spec] = measure(spec, Path(folder), level)
            print(spec, results["models"][spec]["gpu_us"], flush=True)
            environment.write(path, results)
    print(markdown(results))


if __name__ == "__main__":
    main(sys.argv[1:])
