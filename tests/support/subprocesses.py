"""Python processes that import this source tree, some of them without certain packages."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "runtime")

FRAMEWORKS = ("torch", "onnx", "triton")

_HIDE = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def python(code: str, *args: object, without: Iterable[str] = (), timeout: float = 120) -> str:
    """Run ``code`` in the root of the repository, hiding the packages ``without``; returns its output."""
    command = [sys.executable, "-c", _HIDE.format(hidden=tuple(without)) + code, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
