"""The capture process runs at the same addresses each time."""

import subprocess
import sys

import pytest

from nimblec.cuda import fixed_addresses

FLAG = fixed_addresses._ADDR_NO_RANDOMIZE
WHERE = """
import ctypes, sys
personality = ctypes.CDLL(None).personality
print(personality(-1), ctypes.cast(personality, ctypes.c_void_p).value, sys.argv[1:])
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    starter = [sys.executable, "-I", "-S", fixed_addresses.__file__]
    return subprocess.run([*starter, *command], capture_output=True, text=True, check=False)


def can_fix() -> bool:
    """Return whether this system lets a process switch randomisation off; asked in a child, which it changes."""
    code = f"import ctypes; p = ctypes.CDLL(None).personality; raise SystemExit(p(p(-1) | {FLAG}) < 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not can_fix(), reason="needs personality(2), which this system refuses")
def test_two_runs_have_the_same_addresses() -> None:
    first, second = (run(sys.executable, "-c", WHERE, "a b").stdout for _ in range(2))
    assert first == second
    assert int(first.split()[0]) & FLAG
    assert first.endswith("['a b']\n")


def test_the_command_has_its_status_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIMBLEC_TEST", "here")
    done = run(sys.executable, "-c", "import os; print(os.environ['NIMBLEC_TEST']); raise SystemExit(7)")
    assert (done.returncode, done.stdout) == (7, "here\n")
