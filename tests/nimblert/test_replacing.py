"""Files are replaced whole or not at all."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from subprocesses import python

from nimblec.base.installation import environment
from nimblert.errors import NimbleError
from nimblert.plan.files import replacing, scratch_folder


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


def test_something_that_took_the_place_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(NimbleError, match="is a pipe"), replacing(path):
        os.mkfifo(path)
    assert path.is_fifo()


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


def test_the_lock_of_a_folder_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C ends that, the next process removes what is left."""
    remove = os.unlink

    def interrupted(path: str | Path, **options: Any) -> None:
        remove(path, **options)
        if Path(path).name == "lock":
            raise KeyboardInterrupt

    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(tmp_path))
        for number in range(30):
            (folder / str(number)).touch()
        monkeypatch.setattr(os, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stack.close()
    assert list(folder.iterdir()) == []


def test_of_empty_folders_old_ones_are_removed(tmp_path: Path) -> None:
    old, new, full = (tmp_path / f".nimblec-{name}" for name in ("old", "new", "full"))
    for folder in (old, new, full):
        folder.mkdir()
    (full / "file").touch()
    for folder in (old, full):
        os.utime(folder, (0, 0))
    with scratch_folder(tmp_path) as mine:
        assert set(tmp_path.iterdir()) == {new, full, mine}


ENDS_BESIDE_A_THREAD = """
import atexit, sys, threading
from pathlib import Path
folder = Path(sys.argv[1])
atexit.register(lambda: print([path.name for path in folder.glob(".nimblec-*/theirs")]))  # after all other such calls
from nimblert.plan.files import scratch_folder
began = threading.Event()

def use():
    with scratch_folder(folder) as mine:
        (mine / "theirs").touch()
        began.set()
        threading.Event().wait()

threading.Thread(target=use, daemon=True).start()
began.wait()
"""


def test_the_end_of_a_process_takes_no_folder_from_its_daemon_threads(tmp_path: Path) -> None:
    """They may be about to load a plan, whose placeholder file is in there; the next process removes it."""
    assert python(ENDS_BESIDE_A_THREAD, tmp_path) == "['theirs']\n"
    with scratch_folder(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert not list(tmp_path.iterdir())


def test_a_name_with_a_zero_byte_is_a_sentence() -> None:
    with pytest.raises(NimbleError, match="holds a zero byte, which no name of a file does"), replacing(Path("a\0b")):
        pass
