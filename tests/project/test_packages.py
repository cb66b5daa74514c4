"""The two distributions: nimblert alone is lean, and nimblec stands on it without a file of its own in it."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from installing import Environment, checkout
from packaging.requirements import Requirement
from plans import cuda_plan
from subprocesses import FRAMEWORKS, ROOT

import nimblec
from nimblec.plan import encoder

EXTRAS = (*FRAMEWORKS, "onnxruntime", "cuda", "onnxscript", "scipy")
COMPILER = ("nimblec", "click", "rich", "ml_dtypes", "torch", "onnx", "triton", "scipy")

RUN = """
import sys, nimblert
from nimblert import golden
with nimblert.load(sys.argv[1]) as model:
    record = model.program.golden
    outputs = list(model.run(golden.draw_inputs(model.program, record.seed)).values())
    print([str(c) for c in golden.check(record, outputs)])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def lean(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return what `pip install ./runtime[cpu]` makes."""
    made = Environment(tmp_path_factory.mktemp("lean") / "venv")
    made.link("numpy", "onnxruntime")
    made.install(f"{copy}/runtime[cpu]")
    return made


@pytest.fixture(scope="module")
def bare(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return what `pip install ./runtime` makes."""
    made = Environment(tmp_path_factory.mktemp("bare") / "venv")
    made.link("numpy")
    made.install(copy / "runtime")
    return made


@pytest.fixture(scope="module")
def whole(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return what `pip install .` makes."""
    made = Environment(tmp_path_factory.mktemp("whole") / "venv")
    made.link("numpy", "flatbuffers", "click", "rich", "ml_dtypes")
    made.install(copy)
    return made


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "cuda.plan"
    encoder.write(cuda_plan(), path)
    return path


def files(environment: Environment, name: str) -> set[str]:
    return {str(file) for file in environment.installed(name).files or () if "__pycache__" not in file.parts}


def test_the_runtime_alone_needs_numpy(lean: Environment) -> None:
    required = [text for text in lean.installed("nimblert").requires or () if "extra" not in text]
    assert required == ["numpy>=2.3"]
    assert {"nimblert/py.typed", "nimblert/__init__.py"} <= files(lean, "nimblert")
    found = lean.run("-c", f"import importlib.util as u; print([n for n in {COMPILER!r} if u.find_spec(n)])")
    assert (found.stdout, found.stderr) == ("[]\n", "")


def test_runtime_with_numpy_alone_reads_and_saves_plans(bare: Environment, cuda: Path, tmp_path: Path) -> None:
    nimblec.compile(ROOT / "samples" / "digits.onnx", target="cpu", plan_cache=None).save(tmp_path / "digits.plan")
    read = "import sys; from nimblert.check.verify import read_plan; read_plan(sys.argv[1]).save(sys.argv[2])"
    for path in (cuda, tmp_path / "digits.plan", *(ROOT / "tests" / "data").glob("*.plan")):
        done = bare.run("-c", read, path, tmp_path / "again.plan")
        assert (done.stdout, done.stderr) == ("", "")
        assert (tmp_path / "again.plan").read_bytes() == path.read_bytes()
    found = bare.run("-c", "import importlib.util as u; print(u.find_spec('flatbuffers'))")
    assert found.stdout == "None\n"


def test_the_runtime_alone_runs_a_plan(lean: Environment, tmp_path: Path) -> None:
    nimblec.compile(ROOT / "samples" / "digits.onnx", target="cpu", plan_cache=None).save(tmp_path / "digits.plan")
    done = lean.run("-c", RUN, tmp_path / "digits.plan")
    assert (done.stdout, done.stderr) == ("['bit-exact', 'bit-exact']\n", "")


def test_the_runtime_alone_says_what_is_missing(lean: Environment, cuda: Path) -> None:
    done = lean.run("-c", RUN, cuda)
    assert done.stderr.splitlines()[-1].endswith("cuda-bindings is not installed: pip install 'nimblert[cuda]'")
    bfloat16 = lean.run("-c", "from nimblert.arrays.layouts import numpy_dtype; numpy_dtype('bfloat16')")
    assert bfloat16.stderr.splitlines()[-1].endswith("need ml_dtypes: pip install 'nimblert[bfloat16]'")


def test_one_line_installs_the_compiler_and_its_runtime(whole: Environment) -> None:
    done = whole.run("-c", "import nimblec, nimblert; print(nimblec.__version__ == nimblert.__version__)")
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert whole.run("-m", "nimblec", "--help").returncode == 0


def test_nimblec_without_extras_inspects_a_plan(whole: Environment, cuda: Path) -> None:
    done = whole.run("-m", "nimblec", "inspect", cuda, "--json", "--html", cuda.with_suffix(".html"))
    assert done.returncode == 0, done.stderr
    assert "nimblec/inspect/report.py" in cuda.with_suffix(".html").read_text()
    assert json.loads(done.stdout)["device"]["name"] == "NVIDIA H200"


def test_nimblec_without_extras_has_no_framework(whole: Environment) -> None:
    code = f"""
import importlib.util, nimblert, nimblec
assert nimblec.__file__.startswith({str(whole.python.parent.parent)!r}), nimblec.__file__
print([name for name in {EXTRAS!r} if importlib.util.find_spec(name)])
"""
    done = whole.run("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_nimblec_without_extras_says_what_is_missing(whole: Environment, cuda: Path) -> None:
    for args, extra in [
        (("run", cuda), "nimblert[cuda]"),
        (("compile", ROOT / "samples/digits.onnx", "-o", "d.plan"), "nimblec[cpu]"),
    ]:
        done = whole.run("-m", "nimblec", *args)
        assert done.returncode == 2, done
        assert extra in done.stderr.splitlines()[-1]


def test_no_file_belongs_to_both(whole: Environment) -> None:
    assert not {file for file in files(whole, "nimblec") if file.startswith("nimblert/")}
    assert not files(whole, "nimblec") & files(whole, "nimblert")


def test_packages_install_in_any_order(whole: Environment, copy: Path, cuda: Path, tmp_path: Path) -> None:
    changed = whole.copied(tmp_path / "venv")
    inspect = ("-m", "nimblec", "inspect", cuda, "--json")
    changed.install(copy / "runtime")  # beside the compiler, again
    assert json.loads(changed.run(*inspect).stdout)["target"] == "cuda"
    changed.pip("uninstall", "--yes", "nimblec")
    read = "import sys; from nimblert.check.verify import read_plan; print(read_plan(sys.argv[1]).target.name)"
    assert changed.run("-c", read, cuda).stdout == "CUDA\n"


def test_a_source_distribution_needs_the_published_runtime(copy: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("nimblec-*.whl")
    found = Environment(tmp_path / "venv")
    found.pip("install", "--no-index", "--no-deps", wheel)
    version = found.installed("nimblec").version
    assert f"nimblert=={version}" in (found.installed("nimblec").requires or ())


def test_the_torch_that_is_tested_is_one_that_is_admitted() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (torch,) = (wanted for wanted in map(Requirement, extras["compile"]) if wanted.name == "torch")
    assert torch.specifier.contains(metadata.version("torch").partition("+")[0])
