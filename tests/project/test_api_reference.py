"""The API reference can be made, and has every public name."""

import importlib
import re
from pathlib import Path

import pytest
from subprocesses import ROOT, python

RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def test_every_public_name_has_its_place(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="needs the extra docs: not installed")
    python(f"import warnings; warnings.simplefilter('error'); {RUN}", ROOT / "docs" / "api.py", tmp_path)
    for name in ("nimblec", "nimblert"):
        anchors = set(re.findall(r'<section id="(\w+)"', (tmp_path / f"{name}.html").read_text()))
        assert set(importlib.import_module(name).__all__) <= anchors


def test_without_pdoc_it_says_what_to_install(tmp_path: Path) -> None:
    sentence = r"^docs/api\.py: pdoc is not installed, and this needs it: pip install '\.\[docs\]'\n"
    with pytest.raises(AssertionError, match=sentence):
        python(RUN, ROOT / "docs" / "api.py", tmp_path, without=["pdoc"])


def test_without_a_folder_it_says_what_it_takes() -> None:
    pytest.importorskip("pdoc", reason="needs the extra docs: not installed")
    with pytest.raises(AssertionError, match=r"^usage: python -W error docs/api\.py FOLDER\n"):
        python(RUN, ROOT / "docs" / "api.py")
