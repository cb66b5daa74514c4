"""GPU tests run where there is a GPU and say what is missing where there is none; shared fixtures."""

import ctypes
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from command_line import CommandLine


def missing_gpu_capability() -> str | None:
    """What this machine lacks to run GPU tests; None if it lacks nothing.

    Only what is known to mean "no GPU here" counts: any other failure is a failure of the tests.
    """
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA driver: libcuda cannot be loaded"
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return "needs an NVIDIA GPU: the driver finds none"
    assert status == driver.CUresult.CUDA_SUCCESS, f"the driver cannot be used: {status.name}"
    return None


def pytest_configure() -> None:
    """Let Ctrl-C interrupt, as it does at a terminal: a shell starts what it runs in the background without."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is none, with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing_gpu_capability()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home folder of its own for every run, empty as a new user's: no cache is found, none is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def missing_gpu() -> str | None:
    """What this machine lacks to run GPU tests; None if it lacks nothing."""
    return missing_gpu_capability()


@pytest.fixture
def nimblec(capsys: pytest.CaptureFixture[str]) -> "CommandLine":
    """The command line."""
    from command_line import CommandLine  # so that other tests need none of it

    return CommandLine(capsys)
