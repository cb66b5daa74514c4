"""Command and environment of the compiler's own subprocesses."""

import os
import sys

from nimblec.base.installation import package_folders


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs the module ``name`` in this Python, with what `environment` makes importable.

    ``-P`` keeps the current folder off the path, so that files beside a model are not run.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, in which another Python finds the packages of this installation."""
    roots = dict.fromkeys(str(folder.parent) for folder in package_folders())
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # "": the current folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, *inherited])}
