"""A pytest plugin for tests that need a GPU: models compiled in parallel, each once per session.

A compilation mostly waits for a new process to import torch. So a test file starts the compilations that it needs
first, and their processes run in parallel.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
from concurrency import compilations

from nimblert.plan import Plan

_WAIT_S = 1200
"""How long a test may wait for the compilations of its file and then run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    output: Path
    plan: Future[Plan]


class GpuCompiler:
    """Compiles models for the GPU, by name or path, scheduling policy and level of optimisation.

    ``OLD`` is the content of the output file before a compilation.
    """

    OLD = b"the plan before"

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._pool = pool
        self._jobs: dict[tuple[str, str, int], _Job] = {}

    def start(self, *models: str | Path, streams: str = "auto", level: int = 0) -> None:
        """Start the compilations that have not been started yet."""
        for model in models:
            self._job(model, streams, level)

    def plan(self, model: str | Path, streams: str = "auto", level: int = 0) -> Plan:
        """Return the plan of a model; raises what its compilation raised."""
        return self._job(model, streams, level).plan.result()

    def path(self, model: str | Path, streams: str = "auto", level: int = 0) -> Path:
        """Return the file of a model's plan, in a folder of its own, after the compilation has ended."""
        job = self._job(model, streams, level)
        job.plan.exception()
        return job.output

    def wait(self) -> None:
        """Wait until nothing is being compiled, so that the test has the GPU to itself."""
        wait([job.plan for job in self._jobs.values()])

    def _job(self, model: str | Path, streams: str, level: int) -> _Job:
        key = (str(model), streams, level)
        if key not in self._jobs:
            output = self._folder / str(len(self._jobs)) / "model.plan"
            output.parent.mkdir()
            output.write_bytes(self.OLD)
            self._jobs[key] = _Job(output=output, plan=self._pool.submit(_compile, *key, output))
        return self._jobs[key]


def _compile(model: str, streams: str, level: int, output: Path) -> Plan:
    from nimblec.base.options import Options
    from nimblec.compiler import compile_model

    options = Options(target="cuda", streams=streams, level=level)
    return compile_model(model, options=options, output=output, observer=lambda _stage, _seconds: None).plan


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests time for plans: a compilation takes minutes where many share the processors."""
    for item in items:
        if "gpu_compiler" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_WAIT_S))


@pytest.fixture(scope="session")
def gpu_context() -> Iterator[None]:
    """Retain the GPU's primary context, so that closing a plan does not destroy it while torch uses it."""
    from nimblert.cuda import driver

    driver.initialise()
    context = driver.Context()
    yield
    context.close()


@pytest.fixture(scope="session")
def gpu_compiler(gpu_context: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuCompiler]:
    """Yield a compiler of models for the GPU."""
    del gpu_context
    pool = ThreadPoolExecutor(compilations())
    yield GpuCompiler(tmp_path_factory.mktemp("gpu"), pool)
    pool.shutdown(cancel_futures=True)
