"""Files are replaced whole or not at all."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nimblec.base.installation import environment
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


def special_files(folder: Path) -> dict[str, Path]:
    """One of each kind that a test may make, by what it is called."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("link")
    return {"a pipe": folder / "pipe", "a socket": folder / "socket", "a folder": folder / "folder",
            "a symbolic link that leads back to itself": folder / "link"}  # fmt: skip


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    found = {**special_files(tmp_path), "a device": Path("/dev/full")}
    before = {path: path.lstat().st_ino for path in found.values()}
    for kind, path in found.items():
        (tmp_path / "to").unlink(missing_ok=True)
        (tmp_path / "to").symlink_to(path)
        for name in (path, tmp_path / "to"):
            with pytest.raises(NimbleError, match=rf"^{name}: is {kind}, expected the name of a file"), replacing(name):
                pass
    assert {path: path.lstat().st_ino for path in found.values()} == before
    assert not list(tmp_path.glob(".*"))


def test_a_file_in_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NimbleError, match=r"none/file: cannot be written: No such"), replacing(tmp_path / "none/file"):
        pass


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, leads_to in (("link", "there/file"), ("far", tmp_path / "link")):
        (tmp_path / name).symlink_to(leads_to)
        with replacing(tmp_path / name) as file:  # also where nothing is there yet
            file.write(name.encode())
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / "file").read_bytes() == name.encode()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["far", "file", "link", "there"]


KILLED = """
import os, signal, sys
from pathlib import Path
from nimblert.plan.files import replacing
from nimblert.plan.files import scratch_folder
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False, env=environment(), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".theirs.tmp").touch()
    with replacing(path) as file, replacing(tmp_path / "other") as other:  # leaves what is in use
        assert len(list(tmp_path.glob(".nimblec-*"))) == 2
        file.write(b"new")
        other.write(b"new")
    assert sorted(left.name for left in tmp_path.iterdir()) == [".theirs.tmp", "file", "other"]


def test_a_name_with_a_zero_byte_is_a_sentence() -> None:
    with pytest.raises(NimbleError, match="holds a zero byte, which no name of a file does"), replacing(Path("a\0b")):
        pass
