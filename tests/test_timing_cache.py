"""The timing cache: measured once, the same ever after."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from plans import cuda_plan

from nimblec.timing_cache import CachedTimer, TimingCache
from nimblert.errors import NimbleError
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


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "x"}'])
def test_a_damaged_cache_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    assert "a" not in TimingCache(path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TimingCache(tmp_path / "t.json")
    cache["a"] = 1
    cache._path = tmp_path / "file" / "t.json"
    with pytest.raises(NimbleError, match="timing cache"):
        cache.save()
