"""A cache of plans, so that repeating a compilation takes a second and gives the same bytes.

An entry is two files named by its key: the plan, and a record of the key, the plan's SHA-256 and the
notes of the compilation. The record is written last, and only a plan that matches it is used: an entry
that is damaged, half written, renamed or written by two processes at once is compiled again and
replaced, with a note. The folder's size is limited; the least recently used entries are evicted first.
"""

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TypeAlias

from nimblec.base.ir import BUSY
from nimblec.base.options import Options
from nimblec.base.source import Source
from nimblec.base.stages import Observer, stage
from nimblec.plan import ownership
from nimblec.plan.plan_key import digest_of, find_key
from nimblert.errors import NimbleError
from nimblert.plan import Target
from nimblert.plan.files import replacing, scratch_folder

LIMIT_NBYTES = 5 * 10**9
"""The most bytes that the plans of a folder take."""

Compiler: TypeAlias = Callable[[Source, Options, Path, Observer], tuple[str, ...]]
"""Writes the plan of a model to a file, and returns notes for the user."""

_PLAN = re.compile(r"[0-9a-f]{64}\.plan")
"""The cache's own files: users may keep other plans in the same folder."""


_LONGEST_S = 1e7
"""No compilation takes four months."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``key`` and ``sha256`` of the plan's file; the notes of the compilation, and how long it took."""

    key: str
    sha256: str
    seconds: float
    notes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the record in a file; ValueError where it holds none."""
        try:
            match json.loads(path.read_text()):
                case {"key": str(key), "sha256": str(sha256), "seconds": float(seconds), "notes": [*notes]} if (
                    0 <= seconds < _LONGEST_S
                ):
                    return cls(key=key, sha256=sha256, seconds=seconds, notes=tuple(map(str, notes)))
        # JSON that is nested too deep ends in a RecursionError.
        except RecursionError:
            pass
        raise ValueError(f"{path}: not a record of the plan cache")


def compile_once(
    compiler: Compiler, source: Source, target: Target, options: Options, output: Path, observer: Observer
) -> tuple[str, ...]:
    """Call ``compiler(source, options, output, observer)``, unless the plan cache has the result.

    A plan whose schedule was chosen by disturbed times is not kept: another compilation may choose better.
    """
    if options.plan_cache is None or not _is_file(source, target):
        return compiler(source, options, output, observer)
    cache = PlanCache(options.plan_cache)
    problem = cache.problem()
    if problem:
        return (*compiler(source, options, output, observer), problem)
    with stage(observer, "find the plan's key"):
        key = find_key(source, target, options)
    with stage(observer, "read the plan cache"):
        record, problem = cache.copy(key.digest, output) if key else (None, None)
    if record:
        said = f"taken from the plan cache; its compilation took {record.seconds:.1f} s"
        return (*record.notes, said)
    begin = time.perf_counter()
    notes = compiler(source, options, output, observer)
    seconds = time.perf_counter() - begin
    unkept = None
    with stage(observer, "write the plan cache"):
        # An equal key: the model's files have not changed meanwhile.
        if key and BUSY not in notes and key == find_key(source, target, options):
            unkept = cache.keep(key.digest, output, notes, seconds)
    return (*notes, *filter(None, (problem, unkept)))


def _is_file(source: Source, target: Target) -> bool:
    """Return whether the model is determined by its files; the result of a callable is known only once it has run.

    On the CPU target a .pt2 file is exported in this process, whose user may have changed torch's settings.
    """
    return source.kind == "onnx" or (
        source.kind == "exported" and (target is Target.CUDA or "torch" not in sys.modules)
    )


class PlanCache:
    """The plans kept in a folder, by key."""

    def __init__(self, folder: Path, *, limit_nbytes: int | None = None) -> None:
        self._folder = folder
        self._limit_nbytes = LIMIT_NBYTES if limit_nbytes is None else limit_nbytes

    def problem(self) -> str | None:
        """Explain why the folder cannot be used; return None if it can."""
        try:
            ownership.make_folder(self._folder)
            found = ownership.problem(self._folder)
        except OSError as exc:
            found = exc.strerror
        return found and f"plan cache {self._folder}: not used: {found}; --no-plan-cache leaves it out"

    def copy(self, key: str, output: Path) -> tuple[Record | None, str | None]:
        """Copy the plan with this key to ``output``; returns its record, or None and a note on a damaged entry.

        The copy is what is checked: that of a damaged entry is left in ``output``.
        """
        kept = self._folder / f"{key}.plan"
        said = kept.with_suffix(".json")
        try:
            _check_regular(kept, said)
            record = Record.read(said)
            with kept.open("rb") as plan, replacing(output) as file:
                shutil.copyfileobj(plan, file, 1 << 24)
            _check_copy(record, key, output, kept)
        except (FileNotFoundError, NimbleError):  # the compiler will report what cannot be written
            return None, None
        except (OSError, ValueError) as exc:
            return None, f"the plan cache's entry {kept} is damaged, and is replaced: {exc}"
        # The folder may be read-only.
        with suppress(OSError):
            os.utime(kept)
        return record, None

    def keep(self, key: str, plan: Path, notes: tuple[str, ...], seconds: float) -> str | None:
        """Keep a plan file and its notes; return a sentence where that fails."""
        if plan.stat().st_size > self._limit_nbytes:
            return f"not kept in the plan cache, which has room for {self._limit_nbytes:,} bytes"
        try:
            with scratch_folder(self._folder) as scratch:
                copy, said = scratch / "plan", scratch / "record"
                shutil.copyfile(plan, copy)
                record = Record(key=key, sha256=digest_of(copy), seconds=seconds, notes=notes)
                said.write_text(json.dumps(asdict(record)))
                for file in (copy, said):
                    file.chmod(file.stat().st_mode & ~0o022)
                copy.replace(self._folder / f"{key}.plan")
                said.replace(self._folder / f"{key}.json")
            self._make_room()
        except (OSError, NimbleError) as exc:
            return f"not kept in the plan cache {self._folder}: {getattr(exc, 'strerror', None) or exc}"
        return None

    def _make_room(self) -> None:
        """Evict the least recently used plans until the rest is within the limit."""
        found = []
        for plan in self._folder.iterdir():
            if _PLAN.fullmatch(plan.name):
                with suppress(FileNotFoundError):  # removed by another process
                    status = plan.stat()
                    found.append((status.st_mtime_ns, status.st_size, plan))
        excess = sum(nbytes for _, nbytes, _ in found) - self._limit_nbytes
        for _, nbytes, plan in sorted(found):
            if excess <= 0:
                break
            plan.with_suffix(".json").unlink(missing_ok=True)
            plan.unlink(missing_ok=True)
            excess -= nbytes


def _check_copy(record: Record, key: str, copy: Path, kept: Path) -> None:
    """Raise ValueError where the copy of a plan ``kept`` under a key is not the one of its record."""
    if (record.key, record.sha256) != (key, digest_of(copy)):
        raise ValueError(f"{kept}: is not what its record says")


def _check_regular(*paths: Path) -> None:
    """Raise ValueError for a file that others may write, and one that is not regular: a pipe may block forever."""
    for path in paths:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path}: not a regular file")
        if found := ownership.problem(path):
            raise ValueError(found)
