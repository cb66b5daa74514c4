"""Processes that replay new plans, forked from one that has imported its modules and no framework.

A process of `nimblec.plan.lean.LeanProcess` first imports NumPy and ONNX Runtime: longer than compiling most
models of the tests.
"""

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

from nimblec.base.installation import environment
from nimblec.cpu import compile as compiler
from nimblec.plan.lean import LeanProcess
from nimblert.plan import Target

_SERVER = """
import io, json, os, sys, traceback
from nimblert import golden, loading
from nimblert import replay as check
from nimblert.cpu import onnx_session
from nimblert.cuda import driver
from nimblert.plan import container
onnx_session.onnxruntime()
for line in sys.stdin:
    target, threads, given, folder = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
        sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode("latin-1")))
        status = 1
        try:
            status = check.main(target, threads)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(process.communicate)
    return process


_turn = Lock()


class _Forked:
    """The part of Popen's interface that `LeanProcess` uses; all work is done in one call."""

    def __init__(self, target: Target, threads: int | None) -> None:
        self._target, self._threads = target, threads
        self.returncode: int | None = None

    def communicate(self, given: bytes = b"", timeout: float = 0) -> tuple[bytes, bytes]:
        """Return the child's output; the timeout of the test applies, not ``timeout``."""
        del timeout
        if not given:
            return b"", b""
        with tempfile.TemporaryDirectory() as folder, _turn:
            server = _server()
            assert server.stdin is not None
            assert server.stdout is not None
            request = [self._target.name.lower(), self._threads, given.decode("latin-1"), folder]
            print(json.dumps(request), file=server.stdin, flush=True)
            self.returncode = int(server.stdout.readline())
            return (Path(folder) / "out").read_bytes(), (Path(folder) / "err").read_bytes()

    def kill(self) -> None:
        """Do nothing: the child has ended."""


class _ForkedLeanProcess(LeanProcess):
    """A `LeanProcess` that is forked."""

    def __init__(self, target: Target, *, threads: int | None = None) -> None:
        self._process = _Forked(target, threads)  # type: ignore[assignment]  # the interface in use


def fork_lean_processes() -> None:
    """Check plans that this process compiles for the CPU in forked processes from now on."""
    compiler.LeanProcess = _ForkedLeanProcess  # type: ignore[attr-defined]
