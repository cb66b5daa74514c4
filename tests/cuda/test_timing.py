"""How long a plan takes on the GPU, measured by a driver whose clocks move as told."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from copying import copying
from host_driver import HostDriver
from programs import planned

from nimblec.base import gpu_lock
from nimblec.cuda.timing import CudaTimer
from nimblert.cuda import driver
from nimblert.plan import Role

RUN_US = 100.0


class ClockedDriver(HostDriver):
    """A graph keeps the CPU busy for ``launch_us`` and then the GPU, once it is idle, for `RUN_US`."""

    def __init__(self, launch_us: float) -> None:
        super().__init__()
        self._launch_us = launch_us
        self._cpu = self._gpu = 0.0
        self._at: dict[int, float] = {}
        self.work: list[str] = []

    def _cuDeviceGetPCIBusId(self, length: int, device: int) -> bytes:
        return f"0000:{device:02}:00.0".encode()[:length]

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> None:
        del graph, stream
        self.work.append("launch")
        self._cpu += self._launch_us
        self._gpu = max(self._gpu, self._cpu) + RUN_US

    def _cuMemcpyDtoDAsync(self, *args: Any) -> None:
        self.work.append("copy")
        self._copy(*args)

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        del stream
        self._gpu = max(self._gpu, self._cpu)
        self._at[int(event)] = self._gpu

    def _cuEventSynchronize(self, event: Any) -> None:
        self._cpu = max(self._cpu, self._at[int(event)])

    def _cuEventElapsedTime(self, begin: Any, end: Any) -> float:
        return (self._at[int(end)] - self._at[int(begin)]) / 1000


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_lock, "_folder", lambda: tmp_path)
    gpu_lock._gpu.cache_clear()
    yield
    gpu_lock._gpu.cache_clear()


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], ClockedDriver]:
    def put(launch_us: float) -> ClockedDriver:
        host = ClockedDriver(launch_us)
        monkeypatch.setattr(driver, "bindings", lambda: host)
        monkeypatch.setattr("nimblec.cuda.timing.bindings", lambda: host)
        monkeypatch.setattr(driver, "initialise", lambda: None)
        return host

    return put


@pytest.mark.parametrize("launch_us", [5.0, 90.0])
def test_plan_time_is_the_gpus_alone(launch_us: float, clocked: Callable[[float], ClockedDriver]) -> None:
    clocked(launch_us)
    with closing(CudaTimer()) as timer:
        assert timer.duration(copying((6, 8), (0, 1))).ns == pytest.approx(1000 * RUN_US)


def test_each_run_of_a_loop_begins_with_the_initial_state(clocked: Callable[[float], ClockedDriver]) -> None:
    for bodies, work in (((), ["launch"]), ((planned(name="loop", role=Role.BODY),), ["copy", "launch"])):
        host = clocked(5.0)
        with closing(CudaTimer()) as timer:
            timer.duration(replace(copying((6, 8), (0, 1)), state_nbytes=8, bodies=bodies))
        assert host.work == work * host.work.count("launch")
