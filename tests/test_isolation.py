"""Files beside a model are not run: neither by the command line nor by the processes it starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from subprocesses import ROOT, SOURCES

from nimblec.base.installation import environment, module_command

DIGITS = ROOT / "samples" / "digits.onnx"

SHADOWED = ("mmap", "numpy", "onnx", "click")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return a folder whose modules leave a trace where they are imported, under names that the compiler imports."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open('RAN_{name}', 'w')\nraise ImportError('the wrong {name}')\n")
    return folder


def run(command: list[str], folder: Path, pythonpath: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": pythonpath, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("entry", [["-m", "nimblec"], ["-mnimblec"], ["-c", "from nimblec.cli import main; main()"]])
def test_modules_in_the_current_folder_are_not_imported(trap: Path, entry: list[str]) -> None:
    """The last stands for the console script, whose own folder is on the path instead."""
    safe = ["-P"] if entry[0] == "-c" else []
    command = [sys.executable, *safe, *entry, "compile", str(DIGITS), "-o", "d.plan", "--target", "cpu", "-q"]
    done = run(command, trap, os.pathsep.join(map(str, SOURCES)))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in trap.iterdir()) == sorted(["d.plan", *(f"{name}.py" for name in SHADOWED)])


def test_the_users_python_path_still_counts(trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user names there is found in our processes; an empty entry, which means the current folder, is not."""
    named = tmp_path / "named"
    named.mkdir()
    (named / "asked_for.py").write_text("")
    (trap / "lying_around.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{named}")
    command = [*module_command("nimblert.replay", "cpu")[:2], "-c", "import asked_for, nimblert; import lying_around"]
    done = subprocess.run(command, cwd=trap, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'lying_around'"


def test_a_package_in_the_current_folder_can_still_be_named(trap: Path) -> None:
    (trap / "mine.py").write_text("def make():\n    raise KeyError('called')\n")
    command = [sys.executable, "-m", "nimblec", "compile", "mine:make", "-o", "d.plan", "--target", "cpu", "-q"]
    for name in SHADOWED:
        (trap / f"{name}.py").unlink()
    done = run(command, trap, os.pathsep.join(map(str, SOURCES)))
    assert done.returncode == 2
    assert "mine.py raised KeyError: 'called'" in done.stderr


def test_every_process_of_ours_starts_without_the_current_folder() -> None:
    """Also those that no test without a GPU starts."""
    starts = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in (ROOT / "nimblec", ROOT / "runtime")
        for path in folder.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\[(sys\.executable|python)\b", line) and not any(flag in line for flag in ('"-P"', '"-I"'))
    ]
    assert starts == []
