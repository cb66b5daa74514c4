"""Run ONNX Runtime's optimiser, and models that are not checked yet, in a process of its own.

Some models end the process that they run in.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import numpy as np

from nimblec.cpu import observation, optimizer_process
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


def observe_shapes(
    model: bytes, constants: Mapping[str, np.ndarray], inputs: observation.Described, names: Sequence[str]
) -> list[list[list[int]]]:
    """As `observation.observe_shapes`, in the same process as `save_optimized`.

    Raises CompileError if that process ends.
    """
    process = _current.get()
    if process is None:
        return observation.observe_shapes(model, constants, inputs, names)
    return process.observe_shapes(model, constants, inputs, names)


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

    def save_optimized(self, model: bytes, request: Mapping[str, str]) -> None:
        self._ask({"nbytes": len(model), **request}, [model])

    def observe_shapes(
        self, model: bytes, constants: Mapping[str, np.ndarray], inputs: observation.Described, names: Sequence[str]
    ) -> list[list[list[int]]]:
        asked = {
            "constants": {name: (array.dtype.name, array.shape) for name, array in constants.items()},
            "inputs": inputs,
            "names": names,
        }
        data = [array.reshape(-1).view(np.uint8).data for array in constants.values()]
        answer = self._ask({"nbytes": len(model), "observe": asked}, [model, *data])
        shapes: list[list[list[int]]] = answer["shapes"]
        return shapes

    def _ask(self, request: Mapping[str, object], data: Iterable[bytes | memoryview]) -> dict[str, Any]:
        """The answer to a request and the data after it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for part in (json.dumps(request).encode(), b"\n", *data):
                self._process.stdin.write(part)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise _ended(self._process.wait())
        answer: dict[str, Any] = json.loads(line)
        for error in (RefusedError, MemoryError):
            if error.__name__ in answer:
                raise error(answer[error.__name__])
        return answer


def _ended(status: int) -> CompileError:
    if status == -signal.SIGKILL:
        return CompileError(
            "ONNX Runtime was killed (SIGKILL), most often for lack of memory: free some, or compile on a larger "
            "machine"
        )
    how = f"crashed on this model ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
    return CompileError(
        f"ONNX Runtime {how}: if an input chooses a branch, make it a constant by --constant; else simplify the model, "
        "or install another version of onnxruntime"
    )


_current: ContextVar[_Process | None] = ContextVar("_current", default=None)
