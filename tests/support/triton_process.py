"""Runs code that imports Triton in a process of its own: interpreted, or compiled for GPUs that are not there.

Triton reads at its import whether to interpret. The processes are forked from one that has imported torch and the
kernels' ops, which takes longer than most of what they do.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: not installed")
"""CPU builds of torch do not include it."""

ROOT = Path(__file__).parents[2]

_SERVER = """
import json, os, sys, traceback
import nimblec.kernels.families
assert "triton" not in sys.modules
for line in sys.stdin:
    code, environment, folder = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(environment)
        status = 1
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], env=_environment(), text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "runtime"), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(code: str, cache: Path, **variables: str) -> str:
    """The output of ``code``, with an empty cache of compiled kernels and these environment variables."""
    environment = {**_environment(), "TRITON_CACHE_DIR": str(cache), **variables}
    with tempfile.TemporaryDirectory() as folder:
        status = _status(json.dumps([code, environment, folder]))
        assert status == 0, f"status {status}: {(Path(folder) / 'err').read_text()}"
        return (Path(folder) / "out").read_text()


def _status(request: str) -> int:
    """That of a forked process; it is ended where the test runs out of time."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(request, file=server.stdin, flush=True)
        return int(server.stdout.readline())
    except BaseException:
        os.killpg(server.pid, signal.SIGKILL)
        _server.cache_clear()
        raise


def interpret(setup: str, cases: Mapping[str, str], cache: Path) -> None:
    """Run each case, which asserts, in Triton's interpreter."""
    code = setup + "\n".join(f"{case}; print({name!r})" for name, case in cases.items())
    assert interpreted(code, cache).splitlines() == list(cases)


def interpreted(code: str, cache: Path) -> str:
    """The output of ``code`` in Triton's interpreter."""
    return run(f"import quick_interpreter\nquick_interpreter.install()\n{code}", cache, TRITON_INTERPRET="1")
