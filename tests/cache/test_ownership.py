"""Caches that another user of the machine may write are not used."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plan_caching import Compiler, compiled

from nimblec.base.options import Options
from nimblec.plan import ownership
from nimblec.plan.timing_cache import TimingCache

Change = Callable[[Path], None]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def give_away(path: Path) -> None:
    os.chown(path, 12345, -1)


def let_others_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def let_group_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


CHANGES = [
    pytest.param(give_away, "{} belongs to another user (uid 12345): name a place of your own", marks=as_root),
    (let_others_write, "others may write {}: remove what they may have put there, then `chmod go-w {}`"),
    (let_group_write, "others may write {}: remove what they may have put there, then `chmod go-w {}`"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
def test_plan_cache_leaves_writable_folder(model: Path, options: Options, change: Change, sentence: str) -> None:
    """Another user's plan was taken for the own one, where the umask was 000."""
    stub = Compiler()
    compiled(stub, model, options)
    folder = options.plan_cache
    assert folder is not None
    change(folder)
    content, notes = compiled(stub, model, options)
    assert content == b"plan 2"
    assert notes[0] == "note 2"
    said = f"plan cache {folder}: not used: {sentence.format(folder, folder)}; --no-plan-cache leaves it out"
    assert notes[1] == said
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
@pytest.mark.parametrize("suffix", [".plan", ".json"])
def test_plan_cache_replaces_writable_file(
    model: Path, options: Options, change: Change, sentence: str, suffix: str
) -> None:
    stub = Compiler()
    compiled(stub, model, options)
    assert options.plan_cache is not None
    (file,) = options.plan_cache.glob(f"*{suffix}")
    change(file)
    content, notes = compiled(stub, model, options)
    assert content == b"plan 2"
    assert notes[1].endswith(sentence.format(file, file))
    assert compiled(stub, model, options)[0] == b"plan 2"


@pytest.mark.parametrize(("change", "sentence"), CHANGES)
@pytest.mark.parametrize("of", ["folder", "file"])
def test_timing_cache_leaves_file_that_others_may_write(tmp_path: Path, change: Change, sentence: str, of: str) -> None:
    path = tmp_path / "own" / "t.json"
    first = TimingCache(path)
    first["a"] = 3
    first.save()
    changed = path if of == "file" else path.parent
    change(changed)
    cache = TimingCache(path)
    assert "a" not in cache
    cache["b"] = 4
    cache.save()
    assert cache.notes == (f"timing cache {path}: not used: {sentence.format(changed, changed)}",)
    assert json.loads(path.read_text()) == {"a": 3}


def test_caches_are_made_for_their_user_alone(tmp_path: Path, model: Path, options: Options) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            notes = compiled(Compiler(), model, replace(options, plan_cache=tmp_path / "a" / "b"))[1]
        times = TimingCache(tmp_path / "c" / "d" / "t.json")
        times["a"] = 3
        times.save()
    finally:
        os.umask(before)
    assert notes[1].startswith("taken from the plan cache")
    assert TimingCache(tmp_path / "c" / "d" / "t.json")["a"] == 3
    made = [path for top in "ac" for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
    assert len(made) == 7
    assert not any(path.stat().st_mode & 0o022 for path in made)


def test_a_sticky_folder_may_hold_files_of_this_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    file = tmp_path / "t.json"
    assert ownership.problem(tmp_path) is ownership.problem(file) is None
    file.touch(0o644)
    assert ownership.problem(file) is None
