"""What is lean stays lean: imports in this tree, and the wheel without its extras."""

import json
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from plans import cuda_plan
from subprocesses import FRAMEWORKS, ROOT, python

COMPILERS = (*FRAMEWORKS, "onnxruntime", "cuda", "onnxscript", "scipy")

PRINT_IMPORTED = "import sys; print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "cuda.plan"
    cuda_plan().save(path)
    return path


@pytest.mark.parametrize("module", ["nimblert", "nimblec", "nimblec.cli"])
def test_importing_brings_in_no_framework(module: str) -> None:
    imported = python(f"import {module}; {PRINT_IMPORTED}").split()
    assert module.partition(".")[0] in imported
    assert not set(imported) & set(COMPILERS)


def test_the_runtime_imports_neither_compiler_nor_command_line(cuda: Path) -> None:
    code = (
        f"import sys, nimblert; from nimblert import container; container.read(sys.argv[1]); {PRINT_IMPORTED}"
    )
    imported = python(code, cuda).split()
    assert "numpy" in imported
    assert not set(imported) & {*COMPILERS, "nimblec", "click", "rich"}


def test_plans_are_inspected_where_no_framework_can_be_imported(cuda: Path) -> None:
    code = "import sys; from nimblec.cli import main; main(['inspect', sys.argv[1], '--json'])"
    assert json.loads(python(code, cuda, without=COMPILERS))["target"] == "cuda"


# --- the wheel


def lean_distributions(requirements: list[str]) -> Iterator[Distribution]:
    """What ``requirements`` bring without extras, requirements of requirements too, each once."""
    seen: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = distribution(name)
        yield found
        waiting += found.requires or []


@pytest.fixture(scope="module")
def lean_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and what it requires, nothing else.

    The requirements are linked from this environment, so that no network is needed.
    """
    work = tmp_path_factory.mktemp("lean")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(work),
        str(source(work)),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = work.glob("nimblec-*.whl")
    venv.create(work / "venv", with_pip=False)
    lean = work / "venv" / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(lean),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    (packages,) = (work / "venv" / "lib").glob("python*/site-packages")
    (installed,) = Distribution.discover(name="nimblec", path=[str(packages)])
    for found in lean_distributions(installed.requires or []):
        link(found, packages)
    return lean


def source(work: Path) -> Path:
    """A copy of what the wheel is built from, so that the build leaves nothing in the tree."""
    copy = work / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "docs", "LICENSE", "nimblec", "runtime"):
        (copy / name).symlink_to(ROOT / name)
    return copy


def link(found: Distribution, packages: Path) -> None:
    """Link the top-level files and folders of an installed distribution into ``packages``."""
    tops = {file.parts[0] for file in found.files or () if ".." not in file.parts}
    for top in tops - {"__pycache__"}:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))))


def lean_run(lean: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [str(lean), "-I", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=lean.parent)


def test_the_wheel_alone_inspects_a_plan(lean_python: Path, cuda: Path) -> None:
    done = lean_run(lean_python, "-m", "nimblec", "inspect", cuda, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"]["name"] == "NVIDIA H200"


def test_the_wheel_alone_imports_the_runtime_and_has_no_framework(lean_python: Path) -> None:
    code = f"""
import importlib.util, nimblert, nimblec
assert nimblec.__file__.startswith({str(lean_python.parent.parent)!r}), nimblec.__file__
print([name for name in {COMPILERS!r} if importlib.util.find_spec(name)])
"""
    done = lean_run(lean_python, "-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_wheel_alone_says_what_is_missing(lean_python: Path, cuda: Path) -> None:
    for args, extra in [
        (("run", cuda), "nimblec[cuda]"),
        (("compile", ROOT / "samples/digits.onnx", "-o", "d.plan"), "nimblec[cpu]"),
    ]:
        done = lean_run(lean_python, "-m", "nimblec", *args)
        assert done.returncode == 2, done
        assert extra in done.stderr.splitlines()[-1]
