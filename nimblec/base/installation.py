"""This installation of nimblec: its version, and where its packages lie."""

from pathlib import Path

import nimblert

VERSION = "0.1.0"


def package_folders() -> tuple[Path, Path]:
    """The folders of nimblec and nimblert."""
    return Path(__file__).parent.parent, Path(next(iter(nimblert.__path__)))
