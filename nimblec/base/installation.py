"""This installation of nimblec: its version, and where its packages lie."""

import os
import platform
import sys
from pathlib import Path

import nimblert

VERSION = "0.1.0"


def package_folders() -> tuple[Path, Path]:
    """Return the folders of nimblec and nimblert."""
    return Path(__file__).parent.parent, Path(next(iter(nimblert.__path__)))


def processor() -> str:
    """Return the CPU's name and the number of usable processors: the machine that measured times are for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(*names, platform.machine())[0]} x {processor_count()}"


def processor_count() -> int:
    """Return how many processors this process may use: a container or `taskset` allows some of them."""
    return len(os.sched_getaffinity(0))


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs the module ``name`` in this Python, with what `environment` makes importable.

    ``-P`` keeps the current folder off the path, so that files beside a model are not run.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment, extended so that another Python finds the packages of this installation."""
    roots = dict.fromkeys(str(folder.parent) for folder in package_folders())
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # "": the current folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, *inherited])}
