"""Replay a plan's golden record in a process that cannot import the framework."""

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple, Self

from nimblec.base.errors import CompileError
from nimblec.base.installation import environment, module_command
from nimblert.plan import Plan, Target

_TIMEOUT_S = 60
_SLOWEST_NBYTES_S = 20_000_000
"""A slow disk's rate, which bounds the time to read a large plan."""
_SLOWEST_RUNS = 20
"""Two runs, each ten times slower than when it was measured."""
_LOAD_S = 0.5
"""The time to load one more program."""
_UNMEASURED_S = 60.0
"""The duration of a slow run, for a plan without measured times."""


def run_seconds(plan: Plan) -> float:
    """Return the sum of the measured durations of the commands of all programs, and of loading each after the first."""
    measured = sum(work.duration_ns for program in plan.programs for _, work in program.work) / 1e9
    return (measured or _UNMEASURED_S) + _LOAD_S * (len(plan.programs) - 1)


class DifferingOutput(NamedTuple):
    """An output that is not what the framework computed: the name of its program, and a sentence."""

    program: str
    sentence: str


class LeanProcess:
    """The process, which starts its imports before there is a plan; it does not outlive the block."""

    def __init__(self, target: Target, *, threads: int | None = None) -> None:
        """Start a process for a plan of ``target``; on the CPU it computes with ``threads`` threads, if given."""
        wanted = [] if threads is None else [str(threads)]
        self._process = subprocess.Popen(
            module_command("nimblert.replay", target.name.lower(), *wanted),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def differing_output(self, plan: Path, *, run_s: float) -> DifferingOutput | None:
        """Return the first output that is not what the framework computed; None if all are.

        Call it once. ``run_s`` is the approximate duration of one run. Raises CompileError if the plan does
        not run at all.
        """
        timeout_s = round(_TIMEOUT_S + plan.stat().st_size / _SLOWEST_NBYTES_S + _SLOWEST_RUNS * run_s)
        try:
            printed, problems = self._process.communicate(os.fsencode(plan), timeout=timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise CompileError(
                f"the plan did not finish within {timeout_s} s in a process without the framework: compile it again "
                "when this machine is less busy"
            ) from exc
        if self._process.returncode:
            last = problems.decode(errors="replace").strip().splitlines()[-1:]
            raise CompileError(f"the plan does not run in a process without the framework: {' '.join(last)}")
        for output in json.loads(printed)["outputs"]:
            if "different" in (output["verdict"], output["repeat"]):
                sentence = (
                    f"output {output['name']!r}: the replay differs from what the framework computed by "
                    f"{output['difference']:.2g} of its largest magnitude"
                )
                return DifferingOutput(program=output["program"], sentence=sentence)
        return None
