"""What pyproject.toml tells the users of the package."""

import re
import tomllib
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import nimblec
import nimblert
from nimblert.check.verify import read_plan
from nimblert.plan import Target

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def dependencies() -> list[str]:
    """Return what setup.py says that nimblec needs, nimblert apart."""
    (found,) = re.findall(r"install_requires=\[runtime\(\), (.*?)\]", (ROOT / "setup.py").read_text())
    return [text.strip('"') for text in found.split(", ")]


def floors(*requirements: str) -> dict[str, set[str]]:
    """Return the lowest version that each requirement admits, as `name: {version}`."""
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
    assert [text for text in theirs if text not in ours] == []
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


def supported() -> dict[str, str]:
    """Return what docs/supported.md says of each row of its first table."""
    table, *_ = (ROOT / "docs" / "supported.md").read_text().split("## GPUs")
    return dict(re.findall(r"^\| ([\w, -]+) \| ([^|]+) \|", table, re.MULTILINE))


REQUIRED = {Requirement(text).name: Requirement(text).specifier for text in chain(dependencies(), *EXTRAS.values())}


@pytest.mark.parametrize(
    ("row", "packages"),
    [
        ("ONNX Runtime", ["onnxruntime"]),
        ("onnx, scipy", ["onnx", "scipy"]),
        ("numpy", ["numpy"]),
        ("cuda-bindings", ["cuda-bindings"]),
        ("PyTorch", ["torch"]),
    ],
)
def test_what_is_supported_is_what_is_required(row: str, packages: list[str]) -> None:
    said = re.findall(r"\d+(?:\.\d+)*", supported()[row])
    bounds = [(s.operator, s.version) for name in packages for s in REQUIRED[name]]
    assert [version for operator, version in bounds if operator == ">="] == said[: len(packages)]
    assert all(REQUIRED[name].contains(said[packages.index(name)]) for name in packages)
    if row == "PyTorch":  # up to a version, not below one
        assert REQUIRED["torch"].contains(said[1])
        major, minor = map(int, said[1].split("."))
        said[1] = f"{major}.{minor + 1}"
    assert [version for operator, version in bounds if operator == "<"] == said[len(packages) :]


def test_the_versions_here_are_supported() -> None:
    used = chain(dependencies(), *(EXTRAS[name] for name in ("cpu", "cuda", "compile")))
    required = [Requirement(text) for text in used]
    installed = {canonicalize_name(each.name): each.version for each in distributions()}
    found = [each for each in required if canonicalize_name(each.name) in installed]
    assert len(found) >= len(dependencies())
    for each in found:
        assert each.specifier.contains(installed[canonicalize_name(each.name)], prereleases=True), each.name


def test_the_cuda_plans_here_hold_kernels_of_nimblec_alone() -> None:
    """Those of libraries fall under their licences."""
    plans = map(read_plan, sorted((ROOT / "tests" / "data").glob("*.plan")))
    symbols = {kernel.symbol for plan in plans if plan.target is Target.CUDA for kernel in plan.kernels}
    assert {name for name in symbols if not name.startswith("triton_")} == {"_Z5scalePfS_S_i", "_Z3addPfS_", "relu"}


def test_the_supported_systems_are_those_of_the_package() -> None:
    row = supported()
    assert row["system"] == "Linux on x86-64"
    lowest, highest = re.findall(r"3\.\d+", row["Python"])
    assert PROJECT["requires-python"] == f">={lowest}"
    for project in (PROJECT, RUNTIME):
        classifiers = project["classifiers"]
        assert [c for c in classifiers if c.startswith("Operating System")] == ["Operating System :: POSIX :: Linux"]
        named = re.findall(r"Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
        assert (named[0], named[-1]) == (lowest, highest)
