"""Folders for unfinished files; those of a killed process are removed by the next one that makes one there.

The owner of a folder holds a lock (flock) on a file in it. The kernel releases the lock when the process ends, however
it ends; so a folder whose lock is free is abandoned.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from nimblert.errors import NimbleError, raised_by_handler

_PREFIX = ".nimblec-"
_LOCK = "lock"
_LOCKED_AFTER_S = 3600.0
"""An empty folder of this age has no owner, who was killed before it locked the folder, or while it removed it."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder in ``parent``, by default that of temporary files, removed at the end.

    Raises OSError where none can be made in ``parent``, and NimbleError where there is no place for temporary files.
    """
    folder = _temporary() if parent is None else _made(parent)
    # A TemporaryDirectory would be removed as the interpreter shuts down, while a daemon thread may still use it.
    try:
        with _locked(folder):
            yield folder
    finally:
        _remove(folder)


def _temporary() -> Path:
    try:
        return _made(Path(tempfile.gettempdir()))
    except OSError as exc:
        if raised_by_handler(exc):
            raise
        raise NimbleError(
            f"no folder for temporary files can be made: {exc.strerror}: set TMPDIR to a folder that can be written"
        ) from exc


def _made(parent: Path) -> Path:
    _remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the file gets its name only once it is locked."""
    unnamed = folder / f"{_LOCK}.new"
    with unnamed.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(folder / _LOCK)
        yield


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that have ended, of this user only."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if time.time() - status.st_mtime > _LOCKED_AFTER_S and not any(folder.iterdir()):
                folder.rmdir()
                continue
            with (folder / _LOCK).open("rb") as file:
                if _is_free(file):
                    _remove(folder)
        except OSError as exc:
            if raised_by_handler(exc):
                raise
            continue  # another process was faster, or it is not one of ours


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: what is left where a signal handler raises has a free lock, or is empty."""
    try:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
    except OSError as exc:
        if raised_by_handler(exc):
            raise
    shutil.rmtree(folder, ignore_errors=True)


def _is_free(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
