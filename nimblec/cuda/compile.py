"""Compile for the CUDA target: drive the capture process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from nimblec.base import errors
from nimblec.base.errors import CompileError, MissingPackageError
from nimblec.base.installation import environment, module_command
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.base.stages import Observer, stage
from nimblec.cuda import fixed_addresses
from nimblec.cuda.request import CompileRequest
from nimblert.errors import NimbleError
from nimblert.plan.files import scratch_folder


def compile_cuda(source: Source, options: Options, output: Path, observer: Observer) -> tuple[str, ...]:
    """Write the plan of a model to ``output`` and check it; returns notes for the user.

    Raises the error of the capture process, or CompileError if that process died or if the lean replay
    differs from what the framework computed.
    """
    if options.approximate:
        raise CompileError(
            "--approximate: only CPU plans have it: leave it out, or compile for --target cpu; --precision fp16 and "
            "bf16 trade accuracy for speed on a GPU"
        )
    if options.bounds and source.kind != "onnx":
        raise CompileError(
            f"--bound {options.bounds[0][0]}: the outputs of a PyTorch model have fixed sizes in a CUDA plan: compile "
            "for --target cpu, or give an ONNX file"
        )
    if options.precision == "fp8":
        _refuse_fp8(options)
    if options.is_for_absent:
        _refuse_for_absent(options)
    sys_path = tuple(path for path in sys.path if path)
    request = CompileRequest(source=source, options=options, output=output, sys_path=sys_path)
    with scratch_folder() as folder:
        request.save(folder)
        worker = "nimblec.cuda.absent.worker" if options.is_for_absent else "nimblec.cuda.worker"
        notes = tuple(_run_worker(folder, observer, worker))
    if options.precision == "fp8" and source.kind == "onnx" and not options.examples:
        notes += ("ranges of e4m3 were found on random inputs: give typical ones, --example NAME=FILE.npy",)
    return notes


def _refuse_fp8(options: Options) -> None:
    """Raise CompileError for options that a plan with products of e4m3 cannot have."""
    if options.level != 2 and not options.is_for_absent:
        raise CompileError("--precision fp8: only kernels of -O2 multiply e4m3: give -O2, or --precision fp16")
    if options.refittable:
        raise CompileError("--refittable: ranges found for other weights would not fit: give --precision fp16")


def _refuse_for_absent(options: Options) -> None:
    """Raise CompileError for options that a plan for a GPU that is not here cannot have."""
    if options.level not in {None, 2}:
        raise CompileError(
            f"-O{options.level}: a plan for --target {options.target} has our own kernels alone, as -O2 puts them in: "
            "leave -O out, or compile on the GPU"
        )
    if options.refittable:
        raise CompileError(f"--refittable: not for --target {options.target}: leave it out, or compile on the GPU")
    if find_spec("triton") is None:
        raise MissingPackageError(
            f"--target {options.target} compiles kernels with Triton, which is not installed: pip install triton"
        )


_STDERR = 2
"""The output of the user's model goes to standard error, apart from nimblec's own."""


def _run_worker(request: Path, observer: Observer, module: str) -> list[str]:
    read_end, write_end = os.pipe()
    worker = module_command(module, str(request), str(write_end))
    command = [sys.executable, "-I", "-S", fixed_addresses.__file__, *worker]
    with ExitStack() as stack:
        events = stack.enter_context(os.fdopen(read_end))
        with os.fdopen(write_end, "w"):
            process = stack.enter_context(_started(command, pass_fds=(write_end,)))
        notes: list[str] = []
        reached, problem = "start a process", ""
        with stage(observer, reached):
            first = events.readline()
        for line in chain([first] if first else [], events):
            message = json.loads(line)
            if "error" in message:
                raise _error(message)
            if "unforeseen" in message:
                raise _failure(reached, message)
            if "note" in message:
                notes.append(message["note"])
            elif "problem" in message:
                problem = f": {message['problem']}"
            else:
                if message["seconds"] is None:
                    reached = message["stage"]
                observer(message["stage"], message["seconds"])
        status = process.wait()
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise CompileError(f"the capture process {how} in the stage {reached!r}{problem}")
    return notes


@contextmanager
def _started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child process; kill it with its children when the block ends.

    Inductor's workers would take seconds to end by themselves.
    """
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=_STDERR, start_new_session=True, **options
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(stage: str, message: dict[str, str]) -> CompileError:
    """Return an unexpected error of the capture process, with its traceback as a note."""
    error = CompileError(f"the capture process failed in the stage {stage!r}: {message['unforeseen']}")
    error.add_note(message["traceback"])
    return error


def _error(message: dict[str, str]) -> NimbleError:
    # Errors of nimblert (driver, plan) are failed compilations here; their sentence is kept.
    return getattr(errors, message["error"], CompileError)(message["message"])
