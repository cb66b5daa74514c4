"""How loading starts: what is imported when, and which plans start a GPU before the imports."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from copying import ORDERS, copying, on_host
from host_driver import HostDriver
from plans import cpu_plan, cuda_plan
from subprocesses import python

import nimblert
from nimblec.plan import encoder
from nimblert import DeviceMismatchError, PlanFormatError, stages
from nimblert.cuda import driver
from nimblert.plan import Plan

pytest_plugins = ("gpu_memory",)


class FakeLibrary:
    """The functions of libcuda that start a GPU; ``calls`` are their names. ``failing`` returns an error."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def called(*_: object) -> int:
            self.calls.append(name)
            return int(name == self.failing)

        return called


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Put a fake in place of libcuda; the parameter names a function that fails."""
    made = FakeLibrary(getattr(request, "param", ""))
    monkeypatch.setattr(driver, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda _: made}))
    return made


STARTED = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"]


def test_import_leaves_numpy_and_the_gpu_alone() -> None:
    code = "import sys, nimblert; nimblert.load; print(*sys.modules); nimblert.Executable; print(*sys.modules)"
    before, after = (set(line.split()) for line in python(code).splitlines())
    assert not before & {"numpy", "dataclasses", "ctypes", "cuda", "nimblert.plan"}
    assert {"numpy", "nimblert.executable"} <= after


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(nimblert, name) is not None for name in nimblert.__all__)
    with pytest.raises(AttributeError, match=r"^module 'nimblert' has no attribute 'loads'$"):
        nimblert.loads  # type: ignore[attr-defined]  # noqa: B018


@on_host
def test_load_starts_the_gpu_early_and_releases_it(host: HostDriver, library: FakeLibrary, tmp_path: Path) -> None:
    encoder.write(copying((4, 2, 3, 1), ORDERS["contiguous"]), tmp_path / "cuda.plan")
    with nimblert.load(tmp_path / "cuda.plan", device=np.int64(1)) as model:  # type: ignore[arg-type]
        assert library.calls == STARTED
        x = np.arange(24, dtype=np.float32).reshape(4, 2, 3, 1)
        np.testing.assert_array_equal(model(x), x)
    assert not host.references.total()


@pytest.mark.parametrize("library", STARTED[:3], indirect=True)
def test_failed_start_releases_nothing(library: FakeLibrary, tmp_path: Path) -> None:
    encoder.write(cuda_plan(), tmp_path / "cuda.plan")
    damaged = bytearray((tmp_path / "cuda.plan").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "cuda.plan").write_bytes(damaged)
    with pytest.raises((PlanFormatError, DeviceMismatchError)):
        nimblert.load(tmp_path / "cuda.plan")
    assert library.calls == STARTED[: STARTED.index(library.failing) + 1]


def test_other_files_start_no_gpu(library: FakeLibrary, tmp_path: Path) -> None:
    cpu, cuda = tmp_path / "cpu.plan", tmp_path / "cuda.plan"
    encoder.write(cpu_plan(), cpu)
    encoder.write(cuda_plan(), cuda)
    others = {"empty": b"", "short": cuda.read_bytes()[:30], "far": b"\xff" * 64, "text": b"NPLN" * 20}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    nimblert.load(cpu).close()
    for path in (*map(tmp_path.joinpath, others), tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(nimblert.PlanError):
            nimblert.load(path)
    with pytest.raises(nimblert.NimbleError):
        nimblert.load(cuda, trusted_keys=[tmp_path / "absent"])
    with pytest.raises(nimblert.InputError, match="for cuda alone"):
        nimblert.load(cuda, target="cpu")
    assert not library.calls


@on_host
def test_weights_are_uploaded_before_the_digest_is_known_and_no_code_is_loaded(
    host: HostDriver, library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose SHA-256 differs is refused after its weights were copied, before the driver sees its code."""
    del library
    plan = cuda_plan()
    encoder.write(replace(plan, device=replace(plan.device, driver_version=0)), tmp_path / "cuda.plan")
    uploaded: list[int] = []
    verify = nimblert.plan.container.verify_digest

    def late(image: memoryview, path: str, _: Plan) -> None:
        while "cuMemAlloc" not in host.calls:
            time.sleep(0.001)
        uploaded.append(host.calls["cuMemAlloc"])
        verify(image[:-1], path)

    monkeypatch.setattr(nimblert.plan.container, "verify_digest", late)
    with pytest.raises(PlanFormatError, match="was altered"):
        nimblert.load(tmp_path / "cuda.plan")
    assert uploaded
    assert "cuModuleLoadData" not in host.calls
    assert not host.allocated


def test_stages_are_kept_where_somebody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    encoder.write(cpu_plan(), tmp_path / "cpu.plan")
    kept: list[stages.Stage] = []
    monkeypatch.setattr(stages, "kept", kept)
    nimblert.load(tmp_path / "cpu.plan").close()
    assert [stage.name for stage in kept] == ["import", "decode", "SHA-256", "check", "weights and code", "program"]
    assert all(stage.begin <= stage.end for stage in kept)
