"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nimblert.errors import NimbleError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; when the block ends without an error it takes the place of ``path``.

    Until then it has a temporary name in the same directory. Raises NimbleError where that cannot
    be; a file of that name is then as it was before.
    """
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        if path.exists() and not path.is_file():
            raise NimbleError(f"{path}: cannot be written: it is not a regular file")
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as exc:
        raise NimbleError(f"{path}: cannot be written: {exc.strerror}; nothing was changed there") from exc
