"""One assembler for all of Triton's kernels, whatever Inductor finds in its caches."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

from nimblec.kernels.triton_start import choose_assembler

OWN = "/triton/bin/ptxas"


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a Triton with an assembler, and an environment that names none."""
    package = ModuleType("triton")
    package.__dict__["knobs"] = SimpleNamespace(nvidia=SimpleNamespace(ptxas=SimpleNamespace(path=OWN)))
    monkeypatch.setitem(sys.modules, "triton", package)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")


def test_inductor_does_not_choose_another() -> None:
    choose_assembler()
    _set_triton_ptxas_path()
    assert os.environ["TRITON_PTXAS_PATH"] == OWN


def test_one_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/ptxas")
    choose_assembler()
    assert os.environ["TRITON_PTXAS_PATH"] == "/usr/bin/ptxas"


class _NoTool:
    @property
    def ptxas(self) -> None:
        raise RuntimeError("Cannot find ptxas")


@pytest.mark.parametrize("found", [None, SimpleNamespace(knobs=SimpleNamespace(nvidia=_NoTool()))])
def test_without_one_of_tritons_inductor_chooses(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", found)
    choose_assembler()
    assert "TRITON_PTXAS_PATH" not in os.environ
