"""Runs code that imports Triton in a process of its own: interpreted, or compiled for GPUs that are not there."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: not installed")
"""CPU builds of torch do not include it."""

BY_ARCHITECTURE = [
    pytest.param((90,), id="90"),
    pytest.param((80, 100, 120), id="80, 100, 120", marks=pytest.mark.slow),
]
"""Compute capabilities of the known GPUs, in tests that compile for each."""


def run(code: str, cache: Path, **variables: str) -> str:
    """Run ``code`` with an empty cache of compiled kernels and these environment variables; return its output."""
    environment = {**forked.environment(), "TRITON_CACHE_DIR": str(cache), **variables}
    done = forked.run(f"import sys\nassert 'triton' not in sys.modules\n{code}", environment=environment)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout


def interpret(setup: str, cases: Mapping[str, str], cache: Path) -> None:
    """Run each case, which asserts, in Triton's interpreter."""
    code = setup + "\n".join(f"{case}; print({name!r})" for name, case in cases.items())
    assert interpreted(code, cache).splitlines() == list(cases)


def interpreted(code: str, cache: Path) -> str:
    """Run ``code`` in Triton's interpreter, and return its output."""
    return run(f"import quick_interpreter\nquick_interpreter.install()\n{code}", cache, TRITON_INTERPRET="1")
