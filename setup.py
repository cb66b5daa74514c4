"""What pyproject.toml cannot say: the packages that nimblec needs, one of which stands in this repository.

A checkout needs the nimblert beside it, at ``runtime``; a source distribution, which has none, the
published one of its version. So nimblert's files belong to one distribution, however it is installed.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent.absolute()


def runtime() -> str:
    """The requirement of nimblert."""
    described = ROOT / "PKG-INFO"  # of a source distribution
    if not described.exists():
        return f"nimblert @ {(ROOT / 'runtime').as_uri()}"
    (version,) = (line.split()[1] for line in described.read_text().splitlines() if line.startswith("Version: "))
    return f"nimblert=={version}"


PACKAGES = ["numpy>=2.3", "zstandard>=0.23", "flatbuffers>=25.2.10", "click>=8.1", "rich>=14.3", "ml_dtypes>=0.5"]

setup(install_requires=[runtime(), *PACKAGES])
