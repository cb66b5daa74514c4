"""Compile kernels ahead of their first launch, many at once, into Triton's cache on disk.

Each worker is a process of its own that imports Triton but not torch, and needs no GPU: the target is an
argument. A launch then finds its kernel in the cache.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from nimblec.base.errors import CompileError
from nimblec.base.installation import environment, module_command
from nimblec.kernels.gpu import GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel to compile: its template, the dtypes of its pointers (None for an absent one), its settings.

    The template is "module:function"; pointers and settings have the names of its parameters, or of Triton's options.
    ``unaligned`` are the pointers that may not be multiples of 16 bytes.
    """

    template: str
    pointers: Mapping[str, str | None]
    settings: Mapping[str, Any]
    unaligned: Sequence[str] = ()


Compile = Callable[[Sequence[Job]], None]


def compile_all(jobs: Sequence[Job], *, gpu: GPU, processes: int | None = None) -> None:
    """Compile all jobs, a share in each of ``processes`` workers (as many as this process has processors).

    Raises CompileError where a worker fails.
    """
    count = max(1, min(processes or len(os.sched_getaffinity(0)), len(jobs)))
    shares = [list(jobs[n::count]) for n in range(count)]
    with ExitStack() as stack:
        workers = [stack.enter_context(_start(share, gpu)) for share in shares if share]
        problems = [worker.stderr.read() for worker in workers if worker.stderr]
    for worker, problem in zip(workers, problems, strict=True):
        if worker.returncode:
            reason = problem.strip()[-2000:] or f"its process ended with status {worker.returncode}"
            raise CompileError(f"triton: could not compile a kernel: {reason}")


def compile_job(job: Job, *, architecture: int) -> Any:
    """Compile one kernel in this process; Triton's compiled kernel."""
    from triton.runtime.jit import MockTensor

    class Unaligned(MockTensor):  # type: ignore[misc]
        @staticmethod
        def data_ptr() -> int:
            return 1

    pretend_target(architecture)
    pointers = {
        name: None if dtype is None else (Unaligned if name in job.unaligned else MockTensor)(dtype)
        for name, dtype in job.pointers.items()
    }
    return load_template(job.template).warmup(**pointers, grid=(1,), **job.settings)


def pretend_target(architecture: int) -> None:
    """Have Triton compile for a GPU that need not be there, in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(_NoDevice(GPUTarget("cuda", architecture, 32)))


def load_template(template: str) -> Any:
    """Return the Triton function that a template names; imports Triton."""
    module, _, name = template.partition(":")
    return getattr(importlib.import_module(module), name)


class _NoDevice:
    """A driver without a device: all that Triton needs of one while it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton caches the first target of each device

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - the signature is Triton's
        return 0


def _start(jobs: Sequence[Job], gpu: GPU) -> "subprocess.Popen[str]":
    worker = subprocess.Popen(
        module_command("nimblec.kernels.compiling", str(gpu.architecture)),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert worker.stdin is not None
    # A worker that has ended reports by its status.
    with suppress(BrokenPipeError), worker.stdin:
        worker.stdin.write(json.dumps([asdict(job) for job in jobs]))
    return worker


def _main() -> None:
    """Compile, as a worker process, the jobs that standard input holds as JSON."""
    architecture = int(sys.argv[1])
    for described in json.load(sys.stdin):
        compile_job(Job(**described), architecture=architecture)


if __name__ == "__main__":
    _main()
