"""What is lean stays lean: imports in this tree."""

import json
from pathlib import Path

import pytest
from plans import cuda_plan
from subprocesses import FRAMEWORKS, ROOT, python

from nimblec.plan import encoder

COMPILERS = (*FRAMEWORKS, "onnxruntime", "cuda", "onnxscript", "scipy")

PRINT_IMPORTED = "import sys; print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "cuda.plan"
    encoder.write(cuda_plan(), path)
    return path


@pytest.mark.parametrize("module", ["nimblert", "nimblec", "nimblec.cli"])
def test_importing_brings_in_no_framework(module: str) -> None:
    imported = python(f"import {module}; {PRINT_IMPORTED}").split()
    assert module.partition(".")[0] in imported
    assert not set(imported) & set(COMPILERS)


def test_the_runtime_imports_neither_compiler_nor_command_line(cuda: Path) -> None:
    code = (
        f"import sys, nimblert; from nimblert.check.verify import read_plan; read_plan(sys.argv[1]); {PRINT_IMPORTED}"
    )
    imported = python(code, cuda).split()
    assert "numpy" in imported
    assert not set(imported) & {*COMPILERS, "nimblec", "click", "rich"}


def test_cuda_process_imports_no_cpu_target(cuda: Path) -> None:
    code = "import sys; from nimblert.check.verify import read_plan; read_plan(sys.argv[1]); print(*sys.modules)"
    imported = set(python(code, cuda).split())
    assert "nimblert.check.verify" in imported
    assert not imported & {"asyncio", "nimblert.check.cpu_rules", "nimblert.check.onnx_model"}


def test_runtime_reads_plans_without_a_writer_and_its_modules(cuda: Path) -> None:
    code = "import sys; from nimblert.check.verify import read_plan; read_plan(sys.argv[1]); print(*sys.modules)"
    imported = set(python(code, cuda).split())
    assert not imported & {"flatbuffers", "tempfile", "shutil", "lzma", "bz2", "random"}
    assert not [path for path in (ROOT / "runtime").rglob("*.py") if "flatbuffers" in path.read_text()]


def test_plans_are_inspected_where_no_framework_can_be_imported(cuda: Path) -> None:
    code = "import sys; from nimblec.cli import main; main(['inspect', sys.argv[1], '--json'])"
    assert json.loads(python(code, cuda, without=COMPILERS))["target"] == "cuda"


def test_runtime_imports_rarely_used_modules_late() -> None:
    """Loading on a GPU needs concurrent.futures and logging, one error difflib: together a tenth of the import."""
    imported = set(python("import sys, nimblert; print(*sys.modules)").split())
    assert not imported & {"concurrent.futures", "difflib", "logging"}
