"""Environments with this repository's distributions, built from a copy of it without a network."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from subprocesses import ROOT

OURS = {"nimblec", "nimblert"}


def checkout(folder: Path) -> Path:
    """Copy the distributions' sources, so that a build leaves nothing in the tree."""
    copy = folder / "checkout"
    for name in ("docs", "nimblec", "runtime"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=_not_built_from)
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def _not_built_from(_folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name in {"__pycache__", "build"} or name.endswith(".egg-info")}


class Environment:
    """A virtual environment; requirements that are not ours are linked from the one that runs the tests."""

    def __init__(self, folder: Path) -> None:
        if not folder.exists():
            venv.create(folder, with_pip=False)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self.packages,) = (folder / "lib").glob("python*/site-packages")

    def copied(self, folder: Path) -> "Environment":
        """Copy the environment; the copy's scripts still use the Python of this one."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Environment(folder)

    def install(self, *paths: str | Path) -> None:
        """Install folders and extras with pip; all requirements must be linked first."""
        _link(_with_requirements(["setuptools>=77"]), self.packages)  # builds the wheels
        self.pip("install", "--no-index", "--no-build-isolation", *paths)

    def link(self, *requirements: str) -> None:
        """Link the packages of ``requirements``, and their own requirements, without extras."""
        _link(_with_requirements(list(requirements)), self.packages)

    def pip(self, *args: str | Path) -> None:
        """Run pip on this environment; not on PYTHONPATH, where a checkout that was built from seems installed."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *map(str, args)]
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=alone)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        """Run its Python, isolated from other environments."""
        command = [str(self.python), "-I", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=self.python.parent)

    def installed(self, name: str) -> Distribution:
        """Return a distribution that was installed here."""
        (found,) = Distribution.discover(name=name, path=[str(self.packages)])
        return found


def _with_requirements(requirements: list[str]) -> Iterator[Distribution]:
    seen: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in seen | OURS or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = distribution(name)
        yield found
        waiting += found.requires or []


def _link(distributions: Iterator[Distribution], packages: Path) -> None:
    """Link the top-level files and folders of installed distributions into ``packages``."""
    for found in distributions:
        tops = {file.parts[0] for file in found.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            target = packages / top
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(top))))
