"""The API reference can be made, and has every public name."""

import importlib
import re
from pathlib import Path

import pytest
from subprocesses import ROOT, python

pytest.importorskip("pdoc", reason="needs the extra docs: not installed")


def test_every_public_name_has_its_place(tmp_path: Path) -> None:
    run = "import runpy, sys, warnings; warnings.simplefilter('error'); sys.argv.pop(0); "
    python(run + "runpy.run_path(sys.argv[0], run_name='__main__')", ROOT / "docs" / "api.py", tmp_path)
    for name in ("nimblec", "nimblert"):
        anchors = set(re.findall(r'<section id="(\w+)"', (tmp_path / f"{name}.html").read_text()))
        assert set(importlib.import_module(name).__all__) <= anchors
