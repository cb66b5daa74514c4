"""What pyproject.toml tells the users of the package."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import nimblec
import nimblert

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def dependencies() -> list[str]:
    """What setup.py says that nimblec needs, nimblert apart."""
    (found,) = re.findall(r"install_requires=\[runtime\(\), (.*?)\]", (ROOT / "setup.py").read_text())
    return [text.strip('"') for text in found.split(", ")]


def floors(*requirements: str) -> dict[str, set[str]]:
    """The lowest version that each requirement admits, as `name: {version}`."""
    parsed = [Requirement(text) for text in requirements if not text.startswith("nimblec")]
    return {
        canonicalize_name(wanted.name): {s.version for s in wanted.specifier if s.operator == ">="} for wanted in parsed
    }


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    lines = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, lines)}
    declared = floors(*dependencies(), *RUNTIME["dependencies"], *EXTRAS["cpu"], *EXTRAS["cuda"])
    assert declared.keys() <= pins.keys()
    declared |= floors(*EXTRAS["test"])
    assert [name for name, pin in pins.items() if not all(map(pin.contains, declared[name]))] == []


def test_the_runtime_asks_for_what_the_compiler_does() -> None:
    ours = [*dependencies(), *chain(*EXTRAS.values())]
    theirs = [*RUNTIME["dependencies"], *chain(*RUNTIME["optional-dependencies"].values())]
    assert [text for text in theirs if text not in ours] == ["flatbuffers>=25.2.10"]
    for name in ("requires-python", "license", "authors"):
        assert RUNTIME[name] == PROJECT[name]
    assert nimblert.__version__ == nimblec.__version__


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_classifiers_name_the_versions_of_python(version: str) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)
    for project in (PROJECT, RUNTIME):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]


@pytest.mark.parametrize("readme", [ROOT / PROJECT["readme"], ROOT / "runtime" / RUNTIME["readme"]])
def test_the_description_of_the_package_needs_nothing_beside_it(readme: Path) -> None:
    description = readme.read_text()
    assert re.findall(r"\]\((?!https://)", description) == []
