"""Python processes that import this source tree, some of them without certain packages."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT, ROOT / "runtime")

FRAMEWORKS = ("torch", "onnx", "triton")

_BLOCK = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
"""


def python(code: str, *args: object, without: Iterable[str] = (), timeout: float = 120) -> str:
    """Run ``code`` from the root of the repository, where importing ``without`` raises; its output."""
    command = [sys.executable, "-c", _BLOCK.format(blocked=tuple(without)) + code, *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
