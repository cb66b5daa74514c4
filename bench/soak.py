"""Run a plan very often, and check that its outputs, memory, threads and files stay the same.

Usage: ``python -m bench.soak PLAN [--count 200000] [--replay] [--json FILE]``, for any plan on its target.

Calls take eight different inputs in turn, and every output must equal the first for its input, bit for bit;
``--replay`` replays one input, and reads the outputs back a thousand times in total. Memory is sampled a hundred times;
the first tenth is warm-up. The exit status is 1 if any byte changed, or if memory grew.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nimblert
from bench import environment
from bench.memory import SLACK_NBYTES, Held, grown, held
from nimblert import golden
from nimblert.check.verify import read_plan
from nimblert.executable import Executable

INPUTS = 8
SAMPLES = 100
READS = 1000


def outputs(model: Executable, arrays: dict[str, Any]) -> list[bytes]:
    """Return the bytes of each output."""
    return [array.tobytes() for array in model.run(arrays).values()]


def called(model: Executable) -> Callable[[int], bool]:
    """Return a function that makes call number ``index``, and tells whether its outputs were as before."""
    inputs = [golden.draw_inputs(model.program, seed) for seed in range(INPUTS)]
    expected = [outputs(model, arrays) for arrays in inputs]
    return lambda index: outputs(model, inputs[index % INPUTS]) == expected[index % INPUTS]


def replayed(model: Executable, count: int) -> Callable[[int], bool]:
    """Return a function that makes replay number ``index``, and tells whether its outputs, if read, were as before."""
    model.run(golden.draw_inputs(model.program, 0))

    def read() -> list[bytes]:
        return [model.read(tensor.pointer, tensor.span_nbytes).tobytes() for tensor in model.outputs]

    expected = read()
    every = max(1, count // READS)

    def once(index: int) -> bool:
        model.replay()
        return index % every != 0 or read() == expected

    return once


def soak(plan: Path, count: int, *, replay: bool) -> dict[str, Any]:
    """Run the main entry ``count`` times; return the changes."""
    parsed = read_plan(plan)
    looks: list[Held] = []
    wrong = 0
    with nimblert.load(plan) as model:
        once = replayed(model, count) if replay else called(model)
        begin = time.perf_counter()
        for index in range(count):
            wrong += not once(index)
            if index % max(1, count // SAMPLES) == 0:
                looks.append(held(parsed))
        seconds = time.perf_counter() - begin
        looks.append(held(parsed))
    warm = looks[len(looks) // 10 :]
    return {
        "plan": plan.name,
        "target": parsed.target.name.lower(),
        "mode": "replay" if replay else "call",
        "count": count,
        "seconds": round(seconds, 3),
        "wrong": wrong,
        "begin": warm[0],
        "grown": grown(warm[0], warm[-1]),
        "grown_at_most": {name: max(grown(warm[0], look)[name] for look in warm) for name in warm[0]},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the changes; return 1 if any byte changed or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--replay", action="store_true", help="replay one input, without copies of inputs and outputs")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    facts = soak(options.plan, options.count, replay=options.replay)
    environment.report({**facts, "environment": environment.describe()}, options.json)
    allowed = dict.fromkeys(("anonymous", "device"), SLACK_NBYTES)
    flat = all(growth <= allowed.get(name, 0) for name, growth in facts["grown"].items())
    return 0 if flat and not facts["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
