"""The timing cache: measured once, the same ever after."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import CommandLine
from plans import cuda_plan
from subprocesses import ROOT

from nimblec.cache.timing_cache import CachedTimer, TimingCache
from nimblert.plan import Device, Plan


class _CountingTimer:
    max_streams = 4

    def __init__(self) -> None:
        self.calls = 0

    def command_durations(self, plan: Plan) -> Sequence[int]:
        self.calls += 1
        return [1000 * self.calls + i for i, _ in enumerate(self._work(plan))]

    def duration(self, plan: Plan) -> int:
        self.calls += 1
        return 10_000 * self.calls + len(plan.kernels)

    def _work(self, plan: Plan) -> list[object]:
        return [c for c in plan.programs[0].commands if hasattr(c, "op")]


def test_a_second_compilation_measures_nothing(tmp_path: Path) -> None:
    path, device, plan = tmp_path / "cache" / "t.json", Device(name="x"), cuda_plan()
    timer = _CountingTimer()
    first = TimingCache(path)
    cached = CachedTimer(timer, first, device)
    measured = cached.command_durations(plan), cached.duration(plan)
    first.save()
    assert timer.calls == 2
    again = CachedTimer(timer, TimingCache(path), device)
    assert (again.command_durations(plan), again.duration(plan)) == measured
    assert timer.calls == 2


def test_another_device_is_measured_anew(tmp_path: Path) -> None:
    timer, plan = _CountingTimer(), cuda_plan()
    cache = TimingCache(tmp_path / "t.json")
    CachedTimer(timer, cache, Device(name="x")).duration(plan)
    CachedTimer(timer, cache, Device(name="y")).duration(plan)
    assert timer.calls == 2


def test_saving_keeps_what_another_process_wrote(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    one, other = TimingCache(path), TimingCache(path)
    one["a"], other["b"] = 1, 2
    one.save()
    other.save()
    assert json.loads(path.read_text()) == {"a": 1, "b": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


DAMAGED = {
    "{": "is damaged, and is replaced",
    "[1]": "is damaged, and is replaced",
    "[" * 100_000: "is damaged, and is replaced",
    '{"a": "x", "b": 2}': "held 1 entries that are no times, which are replaced",
    '{"a": 1000000000000000000000, "b": 2}': "held 1 entries that are no times, which are replaced",
    '{"a": -1, "b": 2}': "held 1 entries that are no times, which are replaced",
    '{"a": true, "b": 2}': "held 1 entries that are no times, which are replaced",
    '{"a": ' + "9" * 5000 + "}": "is damaged, and is replaced",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_what_is_damaged_is_told_and_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    cache = TimingCache(path)
    assert "a" not in cache
    assert ("b" in cache) == ('"b"' in content)
    cache["a"] = 1
    cache.save()
    assert cache.notes == (f"timing cache {path}: {DAMAGED[content]}",)
    again = TimingCache(path)
    assert (again["a"], again.notes) == (1, ())


def test_an_empty_file_is_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "t.json").touch()
    assert TimingCache(tmp_path / "t.json").notes == ()


def test_a_cache_that_cannot_be_written_or_is_no_file_is_told(tmp_path: Path) -> None:
    """The measurements are in the plan by then: nothing is lost but time."""
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "file" / "t.json", Path("/proc/t.json"), tmp_path / "pipe", tmp_path):
        cache = TimingCache(path)
        cache["a"] = 1
        cache.save()
        assert cache.notes
        assert all(note.startswith(f"timing cache {path}: ") for note in cache.notes)
    assert (tmp_path / "pipe").is_fifo()


def test_a_home_that_cannot_be_written_is_a_note(
    nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    done = nimblec("compile", ROOT / "samples" / "digits.onnx", "-o", tmp_path / "d.plan", "--target", "cpu")
    assert (done.status, done.err) == (0, "")
    for words in ("note: timing cache /proc/.cache/nimblec/timings.json: not kept", "note: no plan cache at /proc/"):
        assert words in done.out
