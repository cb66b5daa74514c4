"""One assembler and one cache for all of Triton's kernels, whatever Inductor finds in its caches."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

from nimblec.kernels.triton_start import choose_assembler_and_cache

OWN = "/triton/bin/ptxas"


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a Triton with an assembler, and an environment that names none."""
    package = ModuleType("triton")
    tools = SimpleNamespace(ptxas=SimpleNamespace(path=OWN))
    package.__dict__["knobs"] = SimpleNamespace(nvidia=tools, cache=SimpleNamespace(dir="/triton/cache"))
    monkeypatch.setitem(sys.modules, "triton", package)
    for name in ("TRITON_PTXAS_PATH", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_inductor_does_not_choose_another() -> None:
    choose_assembler_and_cache()
    _set_triton_ptxas_path()
    assert os.environ["TRITON_PTXAS_PATH"] == OWN


def test_one_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/bin/ptxas")
    choose_assembler_and_cache()
    assert os.environ["TRITON_PTXAS_PATH"] == "/usr/bin/ptxas"


def test_cache_is_named_before_inductor_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_assembler_and_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/triton/cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    choose_assembler_and_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/own"


class _NoTool:
    @property
    def ptxas(self) -> None:
        raise RuntimeError("Cannot find ptxas")


_WITHOUT_TOOL = SimpleNamespace(nvidia=_NoTool(), cache=SimpleNamespace(dir="/triton/cache"))


@pytest.mark.parametrize("found", [None, SimpleNamespace(knobs=_WITHOUT_TOOL)])
def test_without_one_of_tritons_inductor_chooses(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", found)
    choose_assembler_and_cache()
    assert "TRITON_PTXAS_PATH" not in os.environ
