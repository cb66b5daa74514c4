"""Processes that time kernels on a GPU wait for each other."""

import fcntl
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nimblec.base import gpu_lock
from nimblec.base.gpu_lock import locked, undisturbed
from nimblec.base.installation import environment

HOLD = """
import pathlib, sys
from nimblec.base.gpu_lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


FOR_EVER = 1 << 60


def is_taken(path: Path) -> bool:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holder(path: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_one_waits_until_the_other_is_done(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.lock"
    with holder(path) as process:
        begin = time.monotonic()
        end = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -{signal.SIGKILL} {process.pid}"])
        with locked(path, pauses=FOR_EVER):
            assert time.monotonic() - begin >= 0.5
        assert end.wait() == 0


def test_one_that_never_ends_is_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    with holder(path) as process:
        with locked(path, pauses=3):
            assert process.poll() is None
        process.kill()


def test_nobody_waits_where_no_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / "gpu.lock"):
        assert not (tmp_path / "file").is_dir()


def test_the_lock_is_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"cuDeviceGet": 0, "cuDeviceGetPCIBusId": b"0000:3B:00.0\0\0\0\0"}
    monkeypatch.setattr(gpu_lock, "call", lambda api, *_: results[api])
    monkeypatch.setattr(gpu_lock, "_folder", lambda: tmp_path)
    gpu_lock._gpu.cache_clear()
    with gpu_lock.timing_alone():
        assert "timing-0000.3B.00.0.lock" in {path.name for path in tmp_path.iterdir()}
    gpu_lock._gpu.cache_clear()


def test_who_waits_is_next(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []

    def wait() -> None:
        with locked(path, pauses=FOR_EVER):
            order.append("waited")

    for _ in range(5):
        with locked(path):
            waiting = threading.Thread(target=wait)
            waiting.start()
            while not is_taken(tmp_path / "lock.next"):
                time.sleep(0.01)
        with locked(path, pauses=FOR_EVER):
            order.append("again")
        waiting.join()
    assert order == ["waited", "again"] * 5


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_lock, "_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu_lock, "_gpu", lambda: "a")
    return tmp_path / "timing-a.lock"


@pytest.mark.usefixtures("lock")
def test_disturbed_times_are_measured_again() -> None:
    runs = iter([[100, 140, 150], [100, 104, 160], [100, 101, 180], [90, 90, 90]])
    assert undisturbed(lambda: next(runs)) == (101, False)
    assert next(runs) == [90, 90, 90]


@pytest.mark.usefixtures("lock")
def test_the_least_disturbed_times_count_where_none_are_quiet() -> None:
    runs = [[100, 140], [100, 124], [100, 130], [100, 150], [100, 100]]
    left = iter(runs)
    assert undisturbed(lambda: next(left)) == (112, True)
    assert list(left) == runs[4:]


def test_times_are_sampled_under_the_lock(lock: Path) -> None:
    assert undisturbed(lambda: [float(is_taken(lock))] * 3)[0] == 1
    assert not is_taken(lock)
