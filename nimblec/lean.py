"""Replay a plan's golden record in a process that cannot import the framework."""

import json
import subprocess
import sys
from pathlib import Path

from nimblec.errors import CompileError
from nimblec.processes import environment
from nimblert.plan import Program, Record, Wait

_TIMEOUT_S = 60
_SLOWEST_NBYTES_S = 20_000_000
"""How fast even a slow disk gives a large plan's bytes."""
_SLOWEST_RUNS = 20
"""Two runs, each ten times slower than when it was measured."""


def run_seconds(program: Program) -> float:
    """What the commands of a program take one after another, as they were measured."""
    return sum(c.duration_ns for c in program.commands if not isinstance(c, Record | Wait)) / 1e9


def differing_output(plan: Path, *, run_s: float) -> str | None:
    """A sentence about the first output that is not what the framework computed; None if all are.

    ``run_s`` is about what one run takes. Raises CompileError where the plan does not run at all.
    """
    command = [sys.executable, "-m", "nimblert.check", str(plan)]
    timeout_s = round(_TIMEOUT_S + plan.stat().st_size / _SLOWEST_NBYTES_S + _SLOWEST_RUNS * run_s)
    try:
        done = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as exc:
        raise CompileError(f"the plan did not end in {timeout_s} s in a process without the framework") from exc
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CompileError(f"the plan does not run in a process without the framework: {' '.join(last)}")
    for output in json.loads(done.stdout)["outputs"]:
        if "different" in (output["verdict"], output["repeat"]):
            return (
                f"output {output['name']!r}: the replay differs from what the framework computed by "
                f"{output['difference']:.2g} of its largest magnitude"
            )
    return None
