"""GPU tests run where there is a GPU and say what is missing where there is none; shared fixtures."""

import gc
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

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)  # the same on a busy machine
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("quick")

_MOST_WORKERS = 8
"""Each of them imports PyTorch and collects all tests: more of them end no sooner."""
_WORKER_NBYTES = 2 << 30
"""What a process of tests takes at most, with the compilations that it starts."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For ``-n auto``: as many processes as processors and memory allow, and as there are files to run.

    A single file is run in the process itself (0).
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
    """For those who ask whether what saves time here hides something."""
    parser.addoption(
        "--as-users",
        action="store_true",
        help="leave threads, code for vectors, torch's tables and the checks of new plans as users have them, which "
        "takes about half as long again",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set up the process, and what it starts.

    Ctrl-C interrupts, as it does at a terminal: a shell starts what it runs in the background without.
    Computations take one thread, as tests run side by side. Inductor's code for the CPU is scalar:
    what is tested is which calls it is given, and vector code takes twice as long to compile.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--as-users"):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what is being collected, and the modules that it imports: all of it stays."""
    gc.disable()
    found = yield
    gc.enable()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is none, with the reason; files that take PyTorch come first.

    They take the longest, and so processes that run files side by side end at about the same time.
    """
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "torch"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing_gpu_capability()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home folder of its own for every process, empty as a new user's: no cache is found, none is left behind."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _known_generators() -> None:
    """Have Hypothesis find NumPy's generator, which version 6.100 cannot once `_lasting_objects` has it frozen."""
    given(none())(lambda _: None)()


@pytest.fixture(scope="module", autouse=True)
def _lasting_objects() -> None:
    """Keep the garbage collector from what earlier files have brought in and left: modules, and what is cached."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """What every compilation begins with is done once: by the tests after the first that brings these modules in."""
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
    """What this machine lacks to run GPU tests; None if it lacks nothing."""
    return missing_gpu_capability()


@pytest.fixture
def nimblec(capsys: pytest.CaptureFixture[str]) -> "CommandLine":
    """The command line."""
    from command_line import CommandLine  # so that other tests need none of it

    return CommandLine(capsys)
