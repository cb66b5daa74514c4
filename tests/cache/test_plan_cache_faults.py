"""A plan cache that is damaged, full, shared or out of reach costs time only."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plan_caching import KEY, Compiler, change_byte, compiled

from nimblec.base.installation import environment
from nimblec.base.options import Options
from nimblec.plan.plan_cache import PlanCache


def swap_records(plan: Path, record: Path) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": "0" * 64}))
    assert plan.exists()


def change_record(record: Path, **changes: object) -> None:
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def put_another_pair(plan: Path, record: Path) -> None:
    """Put both files of another model's entry under this entry's key."""
    cache = PlanCache(plan.parent / "elsewhere")
    assert cache.problem() is None
    plan.write_bytes(b"another plan")
    assert cache.keep(KEY, plan, (), 1.0) is None
    for path in (plan, record):
        (plan.parent / "elsewhere" / KEY).with_suffix(path.suffix).replace(path)
    (plan.parent / "elsewhere").rmdir()


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a changed byte": lambda plan, _: change_byte(plan),
    "cut short": lambda plan, _: os.truncate(plan, 3),
    "empty": lambda plan, _: os.truncate(plan, 0),
    "no plan": lambda plan, _: plan.unlink(),
    "no record": lambda _, record: record.unlink(),
    "an empty record": lambda _, record: os.truncate(record, 0),
    "not JSON": lambda _, record: record.write_bytes(b"\xff{"),
    "other JSON": lambda _, record: record.write_text('{"sha256": 3}'),
    "another plan's record": swap_records,
    "another pair": put_another_pair,
    "a record nested too deep": lambda _, record: record.write_text("[" * 100_000),
    "an absurd time": lambda _, record: change_record(record, seconds=1e300),
    "no time": lambda _, record: change_record(record, seconds=float("nan")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_compiled_again(tmp_path: Path, model: Path, options: Options, damage: str) -> None:
    stub = Compiler()
    compiled(stub, model, options)
    plan, record = sorted((tmp_path / "plans").iterdir(), key=lambda path: path.suffix == ".json")
    DAMAGE[damage](plan, record)
    content, notes = compiled(stub, model, options)
    assert (content, notes[0]) == (b"plan 2", "note 2")
    said = [] if damage in {"no plan", "no record"} else [f"the plan cache's entry {plan} is damaged, and is replaced"]
    assert [note.partition(": ")[0] for note in notes[1:]] == said
    content, notes = compiled(stub, model, options)
    assert (content, notes[0], stub.calls) == (b"plan 2", "note 2", 2)


def test_a_folder_that_cannot_be_is_said_and_no_error(tmp_path: Path, model: Path, options: Options) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "plans"):
        stub = Compiler()
        content, notes = compiled(stub, model, replace(options, plan_cache=folder))
        assert content == b"plan 1"
        assert notes[0] == "note 1"
        assert str(folder) in notes[1]


def test_a_folder_that_cannot_be_written_is_said_and_no_error(model: Path, options: Options) -> None:
    content, notes = compiled(Compiler(), model, replace(options, plan_cache=Path("/proc")))
    assert content == b"plan 1"
    assert notes[1].startswith("not kept in the plan cache /proc: ")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    plan, folder = tmp_path / "p", tmp_path / "plans"
    folder.mkdir()
    (folder / "mine.plan").write_bytes(bytes(1000))
    cache = PlanCache(folder, limit_nbytes=300)
    keys = [KEY[:-1] + digit for digit in "abcde"]

    def kept() -> list[str]:
        names = {path.stem for path in folder.iterdir()} - {"mine"}
        assert {path.name for path in folder.iterdir()} == {
            "mine.plan", *(f"{n}.plan" for n in names), *(f"{n}.json" for n in names),
        }  # fmt: skip
        return sorted(name[-1] for name in names)

    plan.write_bytes(bytes(100))
    for age, key in enumerate(keys[:3]):
        assert cache.keep(key, plan, (), 1.0) is None
        os.utime(folder / f"{key}.plan", (age, age))
    assert kept() == ["a", "b", "c"]
    assert cache.copy(keys[0], tmp_path / "out")[0] is not None
    cache.keep(keys[3], plan, (), 1.0)
    assert kept() == ["a", "c", "d"]
    plan.write_bytes(bytes(250))
    cache.keep(keys[4], plan, (), 1.0)
    assert kept() == ["e"]
    plan.write_bytes(bytes(301))
    said = cache.keep(keys[0], plan, (), 1.0)
    assert said is not None
    assert "300 bytes" in said
    assert kept() == ["e"]


def test_two_processes_at_once_leave_one_good_plan(tmp_path: Path, model: Path) -> None:
    def start(plan: str) -> "subprocess.Popen[bytes]":
        options = ("--target", "cpu", "--dim", "n=4", "--streams", "1", "--timing-cache", str(tmp_path / "t.json"))
        command = [sys.executable, "-m", "nimblec", "compile", str(model), "-o", str(tmp_path / plan), *options]
        return subprocess.Popen([*command, "--plan-cache", str(tmp_path / "plans"), "-q"], env=environment())

    for plans in (("a.plan", "b.plan"), ("c.plan", "d.plan")):
        assert [process.wait(120) for process in [start(plan) for plan in plans]] == [0, 0]
    a, b, c, d = ((tmp_path / f"{name}.plan").read_bytes() for name in "abcd")
    assert c == d
    assert c in (a, b)  # each measured for itself, and the later one is kept
    assert sorted(path.suffix for path in (tmp_path / "plans").iterdir()) == [".json", ".plan"]
