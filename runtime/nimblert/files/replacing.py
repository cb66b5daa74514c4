"""Files that are written whole or not at all, and never replace anything but a regular file."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nimblert.errors import NimbleError, raised_by_handler
from nimblert.files.scratch import scratch_folder

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link that leads back to itself",
}


def destination(path: str | os.PathLike[str]) -> Path:
    """The place to write a file of this name: symbolic links are followed, as ``cp`` and ``>`` do.

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
    """A file to write, which replaces ``path`` if the block ends without an error.

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
        if raised_by_handler(exc):
            raise
        raise NimbleError(f"{path}: cannot be written: {exc.strerror}; nothing was changed there") from exc
