"""Runs code that imports Triton in a process of its own: interpreted, or compiled for Hopper without a GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: not installed")
"""CPU builds of torch do not include it."""

ROOT = Path(__file__).parents[2]


def run(code: str, cache: Path, **variables: str) -> str:
    """The output of ``code``, with an empty cache of compiled kernels and these environment variables."""
    paths = [str(ROOT), str(ROOT / "runtime"), *(path for path in sys.path if path)]
    given = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    environment = {**os.environ, **given, **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=850)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpret(setup: str, cases: Mapping[str, str], cache: Path) -> None:
    """Run each case, which asserts, in Triton's interpreter."""
    code = setup + "\n".join(f"{case}; print({name!r})" for name, case in cases.items())
    assert run(code, cache, TRITON_INTERPRET="1").splitlines() == list(cases)
