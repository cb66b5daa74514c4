"""Compile kernels ahead of their first launch, many at once, into Triton's cache on disk.

Each worker is a process of its own that imports Triton and no torch, and needs no GPU: it is told
the target. A launch then finds what it would have compiled.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nimblec.errors import CompileError
from nimblec.processes import environment, module_command

HOPPER = 90
"""Compute capability 9.0, the first with programmatic dependent launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel to compile, by its template: the dtypes of its pointers (None where there is none), its settings."""

    kernel: str
    pointers: tuple[str | None, ...]
    settings: dict[str, Any]


def convolution_job(settings: dict[str, Any], *, dtype: str, has: Collection[str]) -> Job:
    """The job of a launch by `launch_convolution`.

    ``dtype`` as in "float16"; ``has`` names the optional tensors: bias, residual, scale, shift, gate, out_moments.
    """
    is_split, has_norm = settings["SPLIT_K"] > 1, settings["NORM"] != "none"
    pointers = (
        dtype,
        dtype,
        *_optional(dtype, has),
        *(["float32" if has_norm else None] * 2),
        dtype,
        "float32" if "out_moments" in has else None,
        "float32" if is_split else None,
        "int32" if is_split else None,
    )
    return Job(kernel="convolution", pointers=pointers, settings=settings)


def depthwise_job(settings: dict[str, Any], *, dtype: str, has: Collection[str]) -> Job:
    """The job of a launch by `launch_depthwise`."""
    return Job(kernel="depthwise", pointers=(dtype, dtype, *_optional(dtype, has), dtype), settings=settings)


def _optional(dtype: str, has: Collection[str]) -> Iterator[str | None]:
    for name in ("bias", "residual", "scale", "shift", "gate"):
        if name not in has:
            yield None
        else:
            yield "float32" if name in {"scale", "shift"} else dtype


def compile_all(jobs: Sequence[Job], *, capability: int = HOPPER, processes: int | None = None) -> None:
    """Compile all jobs, a share in each of ``processes`` workers (as many as this process has processors).

    Raises CompileError where Triton does not compile one.
    """
    count = max(1, min(processes or len(os.sched_getaffinity(0)), len(jobs)))
    shares = [list(jobs[n::count]) for n in range(count)]
    workers = [_start(share, capability) for share in shares if share]
    problems = [worker.stderr.read() for worker in workers if worker.stderr]
    for worker, problem in zip(workers, problems, strict=True):
        if worker.wait():
            raise CompileError(f"triton: could not compile a kernel: {problem.strip()[-2000:]}")


def compile_job(job: Job, *, capability: int) -> Any:
    """Compile one kernel in this process; Triton's compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import MockTensor

    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    pointers = [None if dtype is None else MockTensor(dtype) for dtype in job.pointers]
    template = getattr(importlib.import_module(f"nimblec.kernels.{job.kernel}_template"), job.kernel)
    return template.warmup(*pointers, grid=(1,), **job.settings)


class _NoDevice:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - the signature is Triton's
        return 0


def _start(jobs: Sequence[Job], capability: int) -> "subprocess.Popen[str]":
    described = [{"kernel": job.kernel, "pointers": job.pointers, "settings": job.settings} for job in jobs]
    worker = subprocess.Popen(
        module_command("nimblec.kernels.compiling", str(capability)),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(described))
    worker.stdin.close()
    return worker


def _main() -> None:
    """A worker: jobs as JSON from standard input."""
    capability = int(sys.argv[1])
    for described in json.load(sys.stdin):
        compile_job(Job(**described), capability=capability)


if __name__ == "__main__":
    _main()
