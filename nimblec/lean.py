"""Replay a plan's golden record in a process that cannot import the framework."""

import json
import subprocess
import sys
from pathlib import Path

from nimblec.errors import CompileError
from nimblec.processes import environment

_TIMEOUT_S = 60
_SLOWEST_NBYTES_S = 20_000_000
"""How fast even a slow disk gives a large plan's bytes."""


def differing_output(plan: Path) -> str | None:
    """A sentence about the first output that is not what the framework computed; None if all are.

    Raises CompileError where the plan does not run at all.
    """
    command = [sys.executable, "-m", "nimblert.check", str(plan)]
    timeout_s = _TIMEOUT_S + plan.stat().st_size // _SLOWEST_NBYTES_S
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
