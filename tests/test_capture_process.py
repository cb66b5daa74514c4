"""The process that captures: it takes with it whatever it has started."""

import sys
import time
from pathlib import Path

import pytest

from nimblec.cuda import compile as cuda

STARTS_ANOTHER = """
import subprocess, sys
from pathlib import Path
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).write_text(str(other.pid))
if sys.argv[2] == "stays":
    other.wait()
"""


@pytest.mark.parametrize("first", ["stays", "ends"])
def test_nothing_that_it_started_outlives_it(first: str, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with cuda._started([sys.executable, "-c", STARTS_ANOTHER, str(noted), first]) as process:
        if first == "ends":
            assert process.wait() == 0
        while not (noted.exists() and noted.read_text()):
            time.sleep(0.01)
    begin = time.monotonic()
    while _runs(int(noted.read_text())):
        assert time.monotonic() < begin + 10
        time.sleep(0.01)
    assert process.returncode is not None


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended may wait for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
