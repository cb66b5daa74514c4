"""GPU tests are skipped where there is no GPU, and for no other reason."""

import ctypes

import pytest
from cuda.bindings import driver
from gpu_capability import missing_gpu_capability


@pytest.fixture(autouse=True)
def _libcuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": "a driver"}[name])


def test_a_driver_without_a_gpu_is_a_stated_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,))
    assert missing_gpu_capability() == "needs an NVIDIA GPU: the driver finds none"


def test_a_missing_driver_is_a_stated_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert missing_gpu_capability() == "needs an NVIDIA driver: libcuda cannot be loaded"


def test_a_usable_gpu_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_SUCCESS,))
    assert missing_gpu_capability() is None


def test_a_broken_driver_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda _: (driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,))
    with pytest.raises(AssertionError, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        missing_gpu_capability()
