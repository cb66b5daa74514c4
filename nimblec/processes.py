"""Processes of our own that the compiler starts."""

import os
from pathlib import Path

import nimblec
import nimblert


def environment() -> dict[str, str]:
    """This process's environment, in which another Python finds the packages of this installation."""
    roots = dict.fromkeys(str(Path(next(iter(p.__path__))).parent) for p in (nimblec, nimblert))
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*roots, inherited] if inherited else roots)
    return {**os.environ, "PYTHONPATH": path}
