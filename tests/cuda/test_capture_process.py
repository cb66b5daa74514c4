"""The process that captures: it takes with it whatever it has started."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from nimblec.base.errors import CompileError, TraceError, UnsupportedModelError, unforeseen
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


def test_whatever_it_dies_of_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"options": {"inputs": [], "named_inputs": []}}))
    with pytest.raises(CompileError) as failure:
        cuda._run_worker(tmp_path, lambda _stage, _seconds: None, "nimblec.cuda.worker")
    where = "the capture process failed in the stage 'start a process'"
    sentence = rf"{where}: KeyError: 'timing_cache' \(request\.py, line \d+\)"
    assert re.fullmatch(sentence, str(failure.value))
    (traceback,) = failure.value.__notes__
    assert traceback.startswith("Traceback (most recent call last):")


def test_what_a_rewrite_does_not_foresee_closes_that_way_alone() -> None:
    sentence = r"^IndexError: pop from empty list \(test_capture_process\.py, line \d+\)$"
    with pytest.raises(TraceError, match=sentence), unforeseen():
        [].pop()
    with pytest.raises(UnsupportedModelError, match=r"^told already$"), unforeseen():
        raise UnsupportedModelError("told already")


def _runs(pid: int) -> bool:
    """Return whether there is such a process; one that has ended may wait for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
