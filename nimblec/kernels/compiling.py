"""Compile kernels ahead of their first launch, many at once, into Triton's cache on disk.

A process without a GPU forks workers: the target is an argument. A launch then finds its kernel in the cache.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
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


class Compiler:
    """A process that compiles jobs in workers forked from it, each job once.

    It owns its process, which ends with this one and has its environment as it was at the start, and remembers which
    jobs it was given.
    """

    def __init__(self) -> None:
        """Start the process."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            module_command("nimblec.kernels.compiling"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment(),
        )
        self._numbers: dict[str, int] = {}
        self._errors: dict[int, str] = {}
        """By the numbers of jobs that are done; an empty text where one was compiled."""

    @property
    def count(self) -> int:
        """The number of jobs that it was given."""
        return len(self._numbers)

    def begin(self, jobs: Iterable[Job], *, gpu: GPU) -> None:
        """Compile the jobs that are new, in their order, in the background."""
        texts = dict.fromkeys(_text(job, gpu) for job in jobs)
        new = [text for text in texts if text not in self._numbers]
        if new:
            numbered = list(enumerate(new, self.count))
            self._numbers |= {text: number for number, text in numbered}
            assert self._process.stdin is not None
            # A process that has ended says so when it is waited for.
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(numbered) + "\n")
                self._process.stdin.flush()

    def finish(self, jobs: Iterable[Job], *, gpu: GPU) -> None:
        """Wait for jobs that were begun. Raises CompileError where one cannot be compiled."""
        asked = [self._numbers[_text(job, gpu)] for job in jobs]
        while any(number not in self._errors for number in asked):
            number, error = self._answer()
            self._errors[number] = error
        if problems := [error for number in asked if (error := self._errors[number])]:
            raise CompileError(f"triton: could not compile a kernel: {problems[0]}")

    def close(self) -> None:
        """End the process once it has finished the jobs that it has begun; a process that died leaves jobs unread."""
        with suppress(BrokenPipeError), self._process, self._stderr:
            pass

    def _answer(self) -> tuple[int, str]:
        """Return the number of a job that is done, and its error."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            number, error = json.loads(line)
            return number, error
        status = self._process.wait()
        self._stderr.seek(0)
        reason = self._stderr.read().decode(errors="replace").strip()[-2000:]
        raise CompileError(f"triton: could not compile a kernel: {reason or f'its process ended with status {status}'}")


def _text(job: Job, gpu: GPU) -> str:
    return json.dumps({**asdict(job), "architecture": gpu.architecture})


@cache
def compiler() -> Compiler:
    """Return the compiler of this process, started at the first call: early, as its imports take seconds."""
    return Compiler()


def compile_all(jobs: Sequence[Job], *, gpu: GPU) -> None:
    """Compile all jobs, in as many processes as this process has processors.

    Raises CompileError where one fails.
    """
    started = compiler()
    started.begin(jobs, gpu=gpu)
    started.finish(jobs, gpu=gpu)


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


def _compiled(text: str) -> str:
    """Compile the job of a text; return the error, or an empty text."""
    job = json.loads(text)
    architecture = job.pop("architecture")
    try:
        compile_job(Job(**job), architecture=architecture)
    except Exception as exc:  # noqa: BLE001 - Triton may raise anything
        return f"{type(exc).__name__}: {exc}"[-2000:]
    return ""


def _main() -> None:
    """Compile lists of [number, job] from standard input, one a line; answer each job by [number, error].

    What takes seconds comes before the first line, so that workers, forked with it, have it.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import torch  # noqa: F401 - Triton imports it to look at the arguments of its first kernel
    from triton.runtime.cache import triton_key

    triton_key()  # hashes all of Triton
    # Whoever times kernels meanwhile goes first.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork"), os.nice, (10,)) as pool:
        for line in sys.stdin:
            futures = {pool.submit(_compiled, text): number for number, text in json.loads(line)}
            for future in as_completed(futures):
                problem = future.exception()
                error = repr(problem) if problem else future.result()
                replies.write(json.dumps([futures[future], error]) + "\n")


if __name__ == "__main__":
    _main()
