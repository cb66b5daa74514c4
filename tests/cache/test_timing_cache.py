"""The timing cache: measured once, the same ever after."""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from plans import cuda_plan
from subprocesses import ROOT

from nimblec.plan.planning import Measured
from nimblec.plan.timing_cache import CachedTimer, TimingCache
from nimblert.plan import Command, Device, Launch, Memcpy, Memset, Plan, Pointer, Region, Wait


class _CountingTimer:
    max_streams = 4
    least_gain = 0.02

    def __init__(self, *, is_noisy: bool = False) -> None:
        self.calls = 0
        self.is_noisy = is_noisy

    def command_durations(self, plan: Plan) -> Measured[Sequence[int]]:
        self.calls += 1
        return Measured([1000 * self.calls + i for i, _ in enumerate(self._work(plan))], self.is_noisy)

    def duration(self, plan: Plan) -> Measured[int]:
        self.calls += 1
        return Measured(10_000 * self.calls + len(plan.kernels), self.is_noisy)

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


def test_a_time_that_is_known_is_not_replaced(tmp_path: Path) -> None:
    """Decisions were taken by it: a second compilation, which finds what is kept, has to take the same."""
    timer, plan = _CountingTimer(), cuda_plan()
    cached = CachedTimer(timer, TimingCache(tmp_path / "t.json"), Device(name="x"))
    first = cached.command_durations(plan).ns
    program = plan.programs[0]
    longer = replace(plan, programs=(replace(program, commands=(*program.commands, NEW)),))
    assert cached.command_durations(longer).ns == [*first, 2000 + len(first)]
    assert timer.calls == 2
    assert cached.command_durations(plan).ns == first


def test_cache_keeps_no_noisy_times(tmp_path: Path) -> None:
    """They would decide about every later compilation on a quiet machine."""
    path, plan = tmp_path / "t.json", cuda_plan()
    timer, cache = _CountingTimer(is_noisy=True), TimingCache(path)
    cached = CachedTimer(timer, cache, Device(name="x"))
    assert cached.duration(plan).is_noisy
    assert cached.command_durations(plan).is_noisy
    cache.save()
    assert not path.exists()
    timer.is_noisy = False
    assert [cached.duration(plan).ns // 10_000 for _ in range(2)] == [3, 3]


NEW = Memset(stream=0, op=0, dst=Pointer(region=Region.ARENA), value=0, element_nbytes=4, count=1000)
COMMANDS = cuda_plan().programs[0].commands
LAUNCH = next(index for index, command in enumerate(COMMANDS) if isinstance(command, Launch))


def changed(plan: Plan, index: int, **changes: Any) -> Plan:
    program = plan.programs[0]
    commands = list(program.commands)
    commands[index] = replace(commands[index], **changes)
    return replace(plan, programs=(replace(program, commands=tuple(commands)),))


STRUCT = next(i for i, c in enumerate(COMMANDS) if isinstance(c, Launch) and c.kernel == 1)
"""A launch whose kernel takes one struct of 16 bytes."""


@pytest.mark.parametrize(
    ("index", "change"),
    [(LAUNCH, {"duration_ns": 77}), (LAUNCH, {"op": 1}), (STRUCT, {"params": b"stale bytes here"})],
    ids=["time", "op", "padding"],
)
def test_what_no_time_depends_on_is_in_no_key(tmp_path: Path, index: int, change: dict[str, Any]) -> None:
    timer, plan = _CountingTimer(), cuda_plan()
    other = changed(plan, index, **change)
    assert other != plan
    cached = CachedTimer(timer, TimingCache(tmp_path / "t.json"), Device(name="x"))
    assert cached.duration(plan) == cached.duration(other)
    assert cached.command_durations(plan) == cached.command_durations(other)
    assert timer.calls == 2


MATTERS: dict[str, tuple[type[Command], dict[str, Any]]] = {
    "an early start": (Launch, {"programmatic": True}),
    "all blocks at once": (Launch, {"cooperative": True}),
    "a stream": (Launch, {"stream": 1}),
    "a place": (Launch, {"relocations": ()}),
    "a size": (Launch, {"grid": (2, 1, 1)}),
    "a number": (Launch, {"params": bytes(24) + struct.pack("<i", 17)}),
    "the size of its memory": (Launch, {"reads": (), "writes": ()}),
    "where a copy goes": (Memcpy, {"dst": Pointer(region=Region.ARENA, offset=1024)}),
    "where a copy is from": (Memcpy, {"src": Pointer(region=Region.WEIGHTS, offset=64)}),
    "what is filled": (Memset, {"dst": Pointer(region=Region.ARENA, offset=1024)}),
    "how wide it is filled": (Memset, {"element_nbytes": 1}),
    "an event": (Wait, {"event": 1}),
}


@pytest.mark.parametrize("what", MATTERS)
def test_what_a_run_may_take_longer_for_is_in_its_key(tmp_path: Path, what: str) -> None:
    kind, change = MATTERS[what]
    timer, plan = _CountingTimer(), cuda_plan()
    index = next(index for index, command in enumerate(COMMANDS) if isinstance(command, kind))
    cached = CachedTimer(timer, TimingCache(tmp_path / "t.json"), Device(name="x"))
    assert changed(plan, index, **change) != plan
    assert cached.duration(plan) != cached.duration(changed(plan, index, **change))


def test_saving_keeps_what_another_process_wrote(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    one, other = TimingCache(path), TimingCache(path)
    one["a"], other["a"], other["b"] = 1, 3, 2
    one.save()
    other.save()
    assert json.loads(path.read_text()) == {"a": 1, "b": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("content", [b"important text", b"\x08\x08\x12", b"\xff"])
def test_a_file_of_somebody_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    cache = TimingCache(path)
    cache["a"] = 1
    cache.save()
    assert path.read_bytes() == content
    assert cache.notes == (f"timing cache {path}: is no timing cache, and is left alone: name another file",)


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
        assert all(note.count(str(path)) == 1 for note in cache.notes)
    assert (tmp_path / "pipe").is_fifo()


def test_timing_cache_notes_sealed_home(nimblec: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    done = nimblec("compile", ROOT / "samples" / "digits.onnx", "-o", tmp_path / "d.plan", "--target", "cpu")
    assert (done.status, done.err) == (0, "")
    for words in ("timing cache /proc/.cache/nimblec/timings.json: not kept", "plan cache /proc/.cache/nimblec/plans"):
        assert f"note: {words}" in done.out
