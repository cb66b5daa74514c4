"""Caches that another user may write are not used: whoever writes a plan there decides what it computes."""

import os
import stat
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents for this user alone, whatever the umask is."""
    if not folder.exists():
        make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def problem(path: Path) -> str | None:
    """Return why a file or folder of a cache cannot be trusted and what to do, or None where it can, or is missing.

    Root may change everything, and is trusted. In a folder with the sticky bit, such as /tmp, others may add files but
    not change those of this user: each file there is judged by itself.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid}): name a place of your own"
    if status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"others may write {path}: remove what they may have put there, then `chmod go-w {path}`"
    return None
