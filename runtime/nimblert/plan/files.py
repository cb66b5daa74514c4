"""Files that are written whole or not at all, and folders for unfinished ones.

The owner of a folder holds a lock (flock) on a file in it. The kernel releases the lock when the process ends, however
it ends; the next process that makes a folder there removes those whose lock is free.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nimblert.errors import NimbleError

_PREFIX = ".nimblec-"
_LOCK = "lock"
_LOCKED_AFTER_S = 3600.0
"""Empty folders of this age are abandoned: their owners were killed before they locked, or while they removed them."""


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Provide a new folder in ``parent``, by default that of temporary files, and remove it at the end.

    Raises OSError where none can be made in ``parent``, and NimbleError where there is no place for temporary files.
    """
    folder = _temporary() if parent is None else _made(parent)
    # A TemporaryDirectory would be removed as the interpreter shuts down, while a daemon thread may still use it.
    try:
        unnamed = folder / f"{_LOCK}.new"
        with unnamed.open("wb") as file:
            # The file gets its name only once it is locked.
            fcntl.flock(file, fcntl.LOCK_EX)
            unnamed.rename(folder / _LOCK)
            yield folder
    finally:
        _remove(folder)


def _temporary() -> Path:
    try:
        return _made(Path(tempfile.gettempdir()))
    except OSError as exc:
        raise NimbleError(
            f"no folder for temporary files can be made: {exc.strerror}: set TMPDIR to a folder that can be written"
        ) from exc


def _made(parent: Path) -> Path:
    _remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


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
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
        except OSError:
            continue  # its owner holds the lock, another process was faster, or it is not one of ours


def _remove(folder: Path) -> None:
    """Remove a folder, its lock last: a process that is killed meanwhile leaves it abandoned, or empty."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link that leads back to itself",
}


def destination(path: str | os.PathLike[str]) -> Path:
    """Return the place to write a file of this name: symbolic links are followed, as ``cp`` and ``>`` do.

    Raises NimbleError where anything but a regular file is there.
    """
    if "\0" in os.fspath(path):
        raise NimbleError(f"{os.fspath(path)!r}: holds a zero byte, which no name of a file does")
    found = Path(os.path.realpath(path))
    with suppress(FileNotFoundError, NotADirectoryError):
        kind = stat.S_IFMT(found.lstat().st_mode)
        if kind != stat.S_IFREG:
            raise NimbleError(
                f"{path}: is {_KINDS.get(kind, 'not a regular file')}, expected the name of a file to write"
            )
    return found


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Provide a file to write, which replaces ``path`` if the block ends without an error.

    A symbolic link is kept, and its target replaced. Until then the file is in a folder beside the target, which the
    next writer there removes if this process is killed. Raises NimbleError where it cannot be written; an existing file
    is unchanged then.
    """
    try:
        with scratch_folder(destination(path).parent) as folder:
            temporary = folder / "file"
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(destination(path))
    except OSError as exc:
        raise NimbleError(f"{path}: cannot be written: {exc.strerror}; nothing was changed there") from exc
