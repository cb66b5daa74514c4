"""One model in nimblec alone, at one level. Prints one JSON object of figures, and nothing else.

Usage: python -m bench.nimblec_peer LEVEL MODEL [--fp32] [--turns]; --fp32 switches TF32 off; --turns waits to be
told when to measure. The inputs lie on the GPU, as the peers' do.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.cpu_overhead import spread
from bench.turns import Turn
from nimblec.compiler import compile_model
from nimblec.options import Options
from nimblert import container, golden
from nimblert.cuda import CudaBackend
from nimblert.executable import Executable, load
from nimblert.plan import Launch, Plan, Record, Wait

_WARM_UPS = 20
_REPEATS = 200


def measure(loaded: Executable) -> dict[str, Any]:
    """Wall and GPU microseconds of synchronised replays."""
    assert isinstance(loaded.backend, CudaBackend)
    for _ in range(_WARM_UPS):
        loaded.replay()
    wall = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        loaded.replay()
        wall.append((time.perf_counter() - begin) * 1e6)
    return {"wall_us": spread(np.array(wall)), "gpu_us": spread(loaded.backend.time(_REPEATS))}


def work(plan: Plan) -> dict[str, dict[str, float]]:
    """How often each kernel is launched, how long that takes in all, and the bytes that it reads and writes."""
    found: dict[str, dict[str, float]] = {}
    (program,) = plan.programs
    for command in program.commands:
        if not isinstance(command, Record | Wait):
            name = program.ops[command.op].name
            if isinstance(command, Launch):
                name += f" {plan.kernels[command.kernel].symbol[:80]} {command.grid}"
            row = found.setdefault(name, {"count": 0, "gpu_us": 0.0, "mbytes": 0.0})
            row["count"] += 1
            row["gpu_us"] = round(row["gpu_us"] + command.duration_ns / 1000, 2)
            if isinstance(command, Launch):
                touched = sum(access.nbytes for access in (*command.reads, *command.writes))
                row["mbytes"] = round(row["mbytes"] + touched / 1e6, 3)
    return dict(sorted(found.items(), key=lambda item: -item[1]["gpu_us"]))


def main() -> None:
    """Compile the model named ``package.module:callable`` and measure its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", type=int)
    parser.add_argument("model")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    turn = Turn(wait=options.turns)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.plan")
        asked = Options(
            target="cuda",
            level=options.level,
            precision="fp32" if options.fp32 else "keep",
            timing_cache=Path(folder, "timings.json"),
            plan_cache=None,
        )
        begin = time.perf_counter()
        made = compile_model(options.model, options=asked, output=path, observer=lambda *_: None)
        prepare_s = time.perf_counter() - begin
        plan = container.read(path)
        (program,) = plan.programs
        with load(plan) as loaded:
            loaded.run(golden.draw_inputs(program, 0))
            turn.begin()
            turn.say(**measure(loaded))
    stages: defaultdict[str, float] = defaultdict(float)
    for name, seconds in made.stages:
        stages[name] += seconds
    turn.say(
        prepare_s=prepare_s,
        stages_s=stages,
        notes=made.notes,
        kernels=sum(isinstance(c, Launch) for c in program.commands),
        commands=len(program.commands),
        streams=program.stream_count,
        work=work(plan),
    )
    turn.end()


if __name__ == "__main__":
    main()
