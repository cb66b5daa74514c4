"""The pipeline's edges: what is asked for is not here, not installed, or not a model."""

import tempfile
from pathlib import Path

import pytest
from subprocesses import python

import nimblec
from nimblec.base.errors import missing_package
from nimblec.base.stages import stage
from nimblert.errors import NimbleError

BLOCKED = """
import sys
sys.modules[{name!r}] = None
import nimblec
try:
    nimblec.compile({model!r}, target="cpu", plan_cache=None)
except nimblec.CompileError as exc:
    print(exc)
"""


@pytest.mark.parametrize(("name", "extra"), [("onnx", "cpu"), ("scipy", "cpu")])
def test_missing_package_names_its_extra(name: str, extra: str) -> None:
    model = str(Path(__file__).parents[1] / "samples" / "digits.onnx")
    code = BLOCKED.format(name=name, model=model)
    assert python(code) == f"{name} is not installed, and this needs it: pip install 'nimblec[{extra}]'\n"


def test_a_package_that_torch_needs_to_export_a_module_is_named() -> None:
    code = BLOCKED.format(name="onnx_ir", model="identity").replace("'identity'", "torch.nn.Identity(), torch.ones(1)")
    assert python("import torch" + code) == (
        "onnx_ir is not installed, and this needs it: pip install 'nimblec[compile]'\n"
    )


def test_a_module_of_the_users_own_is_not_ours_to_bring() -> None:
    assert missing_package(ModuleNotFoundError("x", name="my_models")) is None


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nothing.onnx", "no such file"),
        ("", "'': no such file"),
        ("nets/mine.py:net", r"a module is given by its import name: use nets\.mine:net$"),
        ("/nets/mine.py:net", r"import name: run in /nets and use mine:net$"),
        ("my-nets/mine.py:net", "import name: rename the file or its folder, which cannot be imported$"),
        ("no_such_thing", "not of the form package.module:callable"),
    ],
)
def test_a_name_of_nothing_is_refused(model: str, sentence: str) -> None:
    with pytest.raises(nimblec.CompileError, match=sentence):
        nimblec.compile(model, target="cpu")


@pytest.mark.parametrize("found", [None, "missing"])
def test_compile_needs_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(tempfile, "tempdir", found and str(tmp_path / found))
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(NimbleError, match=r"no folder for temporary files can be made: No .*: set TMPDIR to a folder"):
        nimblec.compile(Path(__file__).parents[1] / "samples" / "digits.onnx", target="cpu")


def test_a_stage_that_fails_ends() -> None:
    observed: list[tuple[str, float | None]] = []
    with pytest.raises(nimblec.CompileError), stage(lambda *event: observed.append(event), "check"):
        raise nimblec.CompileError
    (_, begin), (name, end) = observed
    assert (begin, name) == (None, "check")
    assert end is not None


def test_a_folder_named_like_a_model_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(nimblec.CompileError, match=r"model\.onnx: is not a regular file$"):
        nimblec.compile(tmp_path / "model.onnx", target="cpu")


def test_cuda_is_refused_where_it_is_not_here(missing_gpu: str | None) -> None:
    if missing_gpu is None:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(nimblec.DeviceMismatchError, match=r"^target cuda needs a GPU to compile on, and "):
        nimblec.compile("samples/digits.onnx", target="cuda")


def test_python_takes_what_the_command_line_takes(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "samples" / "digits.onnx"
    plan = nimblec.compile(model, target="cpu", streams="max", timing_cache=tmp_path / "times.json")
    record = plan.programs[0].schedule
    assert record is not None
    assert record.policy == "max"
