"""Ask a process of its own to optimise and run models with ONNX Runtime: some models end the process they run in."""

import json
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import numpy as np

from nimblec.base.errors import CompileError
from nimblec.base.installation import environment
from nimblec.cpu import ort_worker
from nimblec.cpu.ort_worker import RefusedError, Value
from nimblert.arrays.layouts import numpy_dtype

LOOP_LIMIT_S = 120
"""Seconds for a request with a model that has loops: one may be endless."""


class EndedError(CompileError):
    """ONNX Runtime ended the process that it ran in, or did not come to an end there."""


def optimize(model: bytes, **request: Any) -> None:
    """Run `ort_worker.optimize` in the process of an `own_process` block, or in this one outside of any.

    Raises EndedError if that process ends, MemoryError if it is killed.
    """
    process = _current.get()
    if process is None:
        ort_worker.optimize(model, **request)
    else:
        process.ask(model, {"optimize": request})


def run(
    model: bytes,
    *,
    folder: str,
    names: Sequence[str] = (),
    feeds: Sequence[ort_worker.Feed] = (),
    level: str = "ORT_DISABLE_ALL",
    threads: int = 0,
) -> tuple[list[tuple[str, str, list[Any]]], list[list[Value] | str]]:
    """Run `ort_worker.run` in the same process as `optimize`.

    Raises EndedError if that process ends, MemoryError if it is killed.
    """
    request = {"level": level, "folder": folder, "threads": threads, "names": list(names)}
    process = _current.get()
    if process is None:
        return ort_worker.run(model, feeds=feeds, **request)  # type: ignore[arg-type]
    return process.run(model, request, feeds)


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
    """The process, which is started again where it has ended. It is killed at the end of the block."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", ort_worker.__file__],
            env={"ORT_DISABLE_TELEMETRY": "1", **environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes

    def run(
        self, model: bytes, request: Mapping[str, object], feeds: Sequence[ort_worker.Feed]
    ) -> tuple[list[tuple[str, str, list[Any]]], list[list[Value] | str]]:
        """See `run`."""
        described = [[(name, array.dtype.name, array.shape) for name, array in feed.items()] for feed in feeds]
        data = [ort_worker.content(array) for feed in feeds for array in feed.values()]
        answer = self.ask(model, {"run": request, "feeds": described}, data)
        results = [found if isinstance(found, str) else [self._read(*v) for v in found] for found in answer["results"]]
        return [(name, kind, shape) for name, kind, shape in answer["described"]], results

    def _read(self, shape: list[int] | None, dtype: str | None) -> Value:
        if not dtype or shape is None:
            return shape, None
        array = np.empty(shape, numpy_dtype(dtype))
        self._answers.readinto(array.reshape(-1).view(np.uint8))  # type: ignore[attr-defined]
        return shape, array

    def ask(self, model: bytes, request: Mapping[str, object], data: Iterable[memoryview] = ()) -> dict[str, Any]:
        """Return the answer to a request and the model and arrays after it."""
        if self._process.poll() is not None:
            self._start()
        limit_s = LOOP_LIMIT_S if b"Loop" in model else None
        try:
            parts: Iterable[bytes | memoryview] = (
                json.dumps({"nbytes": len(model), **request}).encode(),
                b"\n",
                model,
                *data,
            )
            for part in parts:
                self._requests.write(part)
            self._requests.flush()
            line = self._answer(limit_s)
        except BrokenPipeError:
            line = b""
        if not line:
            status = self._process.wait()
            self._end()
            raise _ended(status)
        answer: dict[str, Any] = json.loads(line)
        for error in (RefusedError, MemoryError):
            if error.__name__ in answer:
                raise error(answer[error.__name__])
        return answer

    def _answer(self, limit_s: float | None) -> bytes:
        """Return the line of an answer; b"" where the process has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(limit_s):
                self._end()
                raise EndedError(
                    f"a loop of the model has not ended after {limit_s} s: give it a trip count, or another condition"
                )
        return self._answers.readline()


def _ended(status: int) -> EndedError | MemoryError:
    if status == -signal.SIGKILL:
        return MemoryError("ONNX Runtime was killed (SIGKILL): free some, or compile on a larger machine")
    how = f"crashed on this model ({signal.Signals(-status).name})" if status < 0 else f"ended with status {status}"
    return EndedError(
        f"ONNX Runtime {how}: if an input chooses a branch, make it a constant by --constant; else simplify the model, "
        "or install another version of onnxruntime"
    )


_current: ContextVar[_Process | None] = ContextVar("_current", default=None)
