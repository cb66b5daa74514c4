"""Python processes that are forked from one that has imported torch, which takes longer than most of what they do."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]

KERNELS = "nimblec.optimize.o2"
"""torch and the kernels' ops, without Triton, which reads at its import whether to interpret."""
COMPILER = (
    "nimblec.compiler,nimblec.cpu.compile,nimblec.pytorch.sources,nimblec.onnx_export.export,"
    "functorch.compile,networkx,onnxruntime"
)
"""What a compilation of a module for the CPU imports."""

_SERVER = """
import importlib, json, os, sys, traceback

def run(code, arguments, environment, folder, out):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    imports = os.pread(2, 1 << 20, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(out, name), os.O_WRONLY | os.O_CREAT), number)
    os.write(2, imports)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return 0
    except SystemExit as exc:
        return int(exc.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1

def forked(run, *arguments):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = run(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)

def start(modules):
    (given, give), (taken, take) = os.pipe(), os.pipe()
    def inner():
        os.close(give)
        os.close(taken)
        return serve(modules, open(given), open(take, "w"))
    child = forked(inner)
    os.close(given)
    os.close(take)
    return child, open(give, "w"), open(taken)

def serve(modules, requests, answers):
    for module in modules.split(","):
        importlib.import_module(module)
    others = {}
    for line in requests:
        wanted, *request = json.loads(line)
        if wanted == modules:
            status = os.waitstatus_to_exitcode(os.waitpid(forked(run, *request), 0)[1])
        else:
            if wanted not in others:
                others[wanted] = start(wanted)
            _, give, taken = others[wanted]
            print(line, end="", file=give, flush=True)
            status = int(taken.readline())
        print(status, file=answers, flush=True)
    for _, give, _ in others.values():
        give.close()
    for child, *_ in others.values():
        os.waitpid(child, 0)
    return 0

serve(sys.argv[1], sys.stdin, sys.stdout)
"""


def run(
    code: str, *args: object, environment: Mapping[str, str], folder: Path = ROOT, modules: str = KERNELS
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -c code`` in ``folder`` where ``modules`` are imported; what they print goes to its errors."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [str(arg) for arg in args]
        status = _status(json.dumps([modules, code, arguments, dict(environment), str(folder), out]))
        said, told = ((Path(out) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess([code, *arguments], status, said, told)


def python(code: str, *args: object) -> str:
    """Run ``code`` in the root of the repository, where the compiler is imported, and return its output."""
    done = run(code, *args, environment=environment(), modules=COMPILER)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    """Return this environment with the source tree and the tests' imports on the path, and one thread to compute."""
    paths = [str(ROOT), str(ROOT / "runtime"), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@cache
def _server() -> "tuple[subprocess.Popen[str], IO[str]]":
    """Start a server that has imported `KERNELS`, and forks its own processes for other modules."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, KERNELS], env=environment(), text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
    )  # fmt: skip
    atexit.register(errors.close)
    atexit.register(process.communicate)
    return process, errors


def _status(request: str) -> int:
    """Return the status of a forked process; end it where the test runs out of time."""
    server, errors = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(request, file=server.stdin, flush=True)
        answer = server.stdout.readline()
        errors.seek(0)
        assert answer, errors.read()
        return int(answer)
    except BaseException:
        os.killpg(server.pid, signal.SIGKILL)
        _server.cache_clear()
        raise
