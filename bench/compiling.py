"""Compile a plan for a benchmark: from nothing but the times in a file of its own, and with what that took."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from nimblec.compiler import compile_model
from nimblec.options import Options


def compiled(model: Any, options: Options, path: Path) -> dict[str, Any]:
    """Write a model's plan: the seconds that took, and each stage of it, and what the compiler says of the plan."""
    begin = time.perf_counter()
    made = compile_model(model, options=options, output=path, observer=lambda *_: None)
    stages: defaultdict[str, float] = defaultdict(float)
    for name, seconds in made.stages:
        stages[name] += seconds
    return {"prepare_s": time.perf_counter() - begin, "stages_s": stages, "notes": made.notes}
