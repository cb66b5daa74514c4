"""Compilation of plans for benchmarks, with a timing cache of their own and no plan cache."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from nimblec.base.options import Options, read_options
from nimblec.compiler import compile_model


def compiled(model: Any, options: Options, path: Path) -> dict[str, Any]:
    """Write a model's plan; returns the seconds in total ("prepare_s") and by stage, and the compiler's notes."""
    begin = time.perf_counter()
    made = compile_model(model, options=options, output=path, observer=lambda *_: None)
    stages: defaultdict[str, float] = defaultdict(float)
    for name, seconds in made.stages:
        stages[name] += seconds
    return {"prepare_s": time.perf_counter() - begin, "stages_s": stages, "notes": made.notes}


def plan_of(asked: str, path: Path, *, target: str, level: int, streams: str = "auto") -> Path:
    """``asked`` if it is a plan file; else a model, package.module:callable, compiled to ``path``.

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
