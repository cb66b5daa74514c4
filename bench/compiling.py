"""Compilation of plans for benchmarks, with a timing cache of their own and no plan cache."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from nimblec.base.options import Options, read_options
from nimblec.compiler import Compiled, compile_model
from nimblert.plan import Plan


def options(folder: Path, level: int | None, **more: Any) -> Options:
    """Return the options of a level of the CUDA target, or of the CPU target (None); times are kept in ``folder``."""
    target = "cpu" if level is None else "cuda"
    return read_options(target=target, level=level, timing_cache=folder / "timings", plan_cache=None, **more)


def compiled(model: Any, options: Options, path: Path) -> tuple[Plan, dict[str, Any]]:
    """Write a model's plan; return it, the seconds in total ("prepare_s") and by stage, and the compiler's notes."""
    begin = time.perf_counter()
    made: Compiled = compile_model(model, options=options, output=path, observer=lambda *_: None)
    stages: defaultdict[str, float] = defaultdict(float)
    for name, seconds in made.stages:
        stages[name] += seconds
    return made.plan, {"prepare_s": time.perf_counter() - begin, "stages_s": stages, "notes": made.notes}


def plan_of(asked: str, path: Path, *, level: int | None, **more: Any) -> Path:
    """Return ``asked`` if it is a plan file; else compile a model, package.module:callable, to ``path``."""
    if asked.endswith(".plan"):
        return Path(asked)
    folder = path.with_suffix("")
    folder.mkdir()
    compiled(asked, options(folder, level, **more), path)
    return path
