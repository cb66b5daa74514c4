"""Files that are written whole or not at all, and never over what is not a file."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nimblert.errors import NimbleError
from nimblert.files.scratch import scratch_folder

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link that leads back to itself",
}


def destination(path: Path) -> Path:
    """Where a file of this name is to be written: what symbolic links lead to, as for ``cp`` and ``>``.

    Raises NimbleError where something other than a regular file is there, which is never replaced.
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
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; when the block ends without an error it takes the place of ``path``.

    A symbolic link stays, and what it leads to is replaced. Until then the file is in a folder beside
    it, which the next one to write there removes if this process is killed. Raises NimbleError where
    that cannot be; a file of that name is then as it was before.
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
