"""What pyproject.toml tells the users of the package."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def floors(*requirements: str) -> dict[str, set[str]]:
    """The lowest version that each requirement admits, as `name: {version}`."""
    parsed = [Requirement(text) for text in requirements if not text.startswith("nimblec")]
    return {
        canonicalize_name(wanted.name): {s.version for s in wanted.specifier if s.operator == ">="} for wanted in parsed
    }


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    lines = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, lines)}
    declared = floors(*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["cuda"])
    assert declared.keys() <= pins.keys()
    declared |= floors(*EXTRAS["test"])
    assert [name for name, pin in pins.items() if not all(map(pin.contains, declared[name]))] == []


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_classifiers_name_the_versions_of_python(version: str) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_the_description_of_the_package_needs_nothing_beside_it() -> None:
    description = (ROOT / PROJECT["readme"]).read_text()
    assert re.findall(r"\]\((?!https://)", description) == []
