"""Shared fixtures and hooks; GPU tests are skipped, with the reason, on machines without a GPU."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gpu_capability import missing_gpu_capability
from hypothesis import given, settings
from hypothesis.strategies import none

if TYPE_CHECKING:
    from command_line import CommandLine

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)  # machines may be busy
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("quick")

_MOST_WORKERS = 8
"""More workers are not faster, as each imports PyTorch and collects all tests."""
_WORKER_NBYTES = 2 << 30
"""Peak memory of a worker and the compilations that it starts."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of workers for ``-n auto``: limited by processors, memory and the number of files.

    0 runs a single file in this process.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    files = len({*paths}) if all(path.is_file() for path in paths) else _MOST_WORKERS
    count = min(_MOST_WORKERS, files, len(os.sched_getaffinity(0)), _available_nbytes() // _WORKER_NBYTES)
    return count if count > 1 else 0


def _available_nbytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option to check that shortcuts of the tests hide nothing."""
    parser.addoption(
        "--as-users",
        action="store_true",
        help="use threads, vector code, torch's tables and the checks of new plans as users do",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set up this process and its children.

    Ctrl-C interrupts, as at a terminal: a shell starts processes in the background with it ignored. Computations use
    one thread, as tests run in parallel. Inductor writes scalar code for the CPU: vector code takes twice as long to
    compile, and tests depend only on the calls that it is given.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--as-users"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector while tests and modules are collected, all of which stay.

    Then keep pytest, which listens to loggers that do not propagate, from the one of PyTorch's traces: to a listener,
    of which users have none, PyTorch describes every graph.
    """
    gc.disable()
    found = yield
    gc.enable()
    logging.getLogger("torch.__trace").propagate = True
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu if there is none, with the reason; run files that import PyTorch first.

    These take longest: starting them first balances the workers.
    """
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "torch"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing_gpu_capability()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield an empty home folder for each process: no cache is found, none is left behind."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _known_generators() -> None:
    """Let Hypothesis find NumPy's generator before `_lasting_objects` freezes it: version 6.100 cannot afterwards."""
    given(none())(lambda _: None)()


@pytest.fixture(scope="module", autouse=True)
def _lasting_objects() -> None:
    """Exempt modules and caches of earlier files from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Share the common start of compilations between tests, once the modules are imported."""
    if request.config.getoption("--as-users"):
        return
    if "torch.export" in sys.modules:
        import torch_tables

        torch_tables.make_once()
    if "nimblec.cpu.compile" in sys.modules:
        import lean_checks

        lean_checks.fork_lean_processes()


@pytest.fixture(scope="session")
def missing_gpu() -> str | None:
    """Return the reason why this machine cannot run GPU tests; None if it can."""
    return missing_gpu_capability()


@pytest.fixture
def nimblec(capsys: pytest.CaptureFixture[str]) -> "CommandLine":
    """Return the command line."""
    from command_line import CommandLine  # needed by its users alone

    return CommandLine(capsys)
