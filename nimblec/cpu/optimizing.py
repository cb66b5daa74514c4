"""Run ONNX Runtime's optimiser in a process of its own, since some models end the process that it runs in."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self

from nimblec.cpu import optimizer_process
from nimblec.cpu.optimizer_process import RefusedError
from nimblec.errors import CompileError
from nimblec.processes import environment


def save_optimized(model: bytes, **request: str) -> None:
    """As `optimizer_process.save_optimized`, in the process of an `own_process` block, or in this one outside of any.

    Raises CompileError if that process ends.
    """
    process = _current.get()
    if process is None:
        optimizer_process.save_optimized(model, request)
    else:
        process.save_optimized(model, request)


@contextmanager
def own_process() -> Iterator[None]:
    """Start the process at once, so that it imports what it needs meanwhile; it ends with the block."""
    with _Process() as process:
        token = _current.set(process)
        try:
            yield
        finally:
            _current.reset(token)


class _Process:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", optimizer_process.__file__],
            env={"ORT_DISABLE_TELEMETRY": "1", **environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def save_optimized(self, model: bytes, request: dict[str, str]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for part in (json.dumps({"nbytes": len(model), **request}).encode(), b"\n", model):
                self._process.stdin.write(part)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise _ended(self._process.wait())
        for name, words in json.loads(answer).items():
            raise {error.__name__: error for error in (RefusedError, MemoryError)}[name](words)


def _ended(status: int) -> CompileError:
    if status == -signal.SIGKILL:
        return CompileError(
            "ONNX Runtime's optimiser was killed (SIGKILL), most often for lack of memory: free some, or compile on "
            "a larger machine"
        )
    how = f"crashed on this model ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
    return CompileError(
        f"ONNX Runtime's optimiser {how}: if an input chooses a branch, make it a constant by --constant; else "
        "simplify the model, or install another version of onnxruntime"
    )


_current: ContextVar[_Process | None] = ContextVar("_current", default=None)
