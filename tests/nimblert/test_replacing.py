"""Files are replaced whole or not at all."""

from pathlib import Path

import pytest

from nimblert.errors import NimbleError
from nimblert.plan.files import replacing


def test_the_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def write_and_fail(path: Path, error: BaseException) -> None:
    with replacing(path) as file:
        file.write(b"new")
        raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_old_file_stays_where_writing_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    expected = NimbleError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_and_fail(path, error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
