"""Compile a plan for a benchmark: from nothing but the times in a file of its own, and with what that took."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from nimblec.compiler import compile_model
from nimblec.options import Options, read_options


def compiled(model: Any, options: Options, path: Path) -> dict[str, Any]:
    """Write a model's plan: the seconds that took, and each stage of it, and what the compiler says of the plan."""
    begin = time.perf_counter()
    made = compile_model(model, options=options, output=path, observer=lambda *_: None)
    stages: defaultdict[str, float] = defaultdict(float)
    for name, seconds in made.stages:
        stages[name] += seconds
    return {"prepare_s": time.perf_counter() - begin, "stages_s": stages, "notes": made.notes}


def plan_of(asked: str, path: Path, *, target: str, level: int, streams: str = "auto") -> Path:
    """The plan file that is asked for, or that of a model, package.module:callable, which is compiled to ``path``.

    The CPU target has no levels.
    """
    if asked.endswith(".plan"):
        return Path(asked)
    options = read_options(
        target=target,
        level=None if target == "cpu" else level,
        streams=streams,
        timing_cache=path.with_suffix(".timings"),
        plan_cache=None,
    )
    compiled(asked, options, path)
    return path
