"""Fixtures of the tests of the plan cache."""

from pathlib import Path

import pytest
from plan_caching import write_model

from nimblec.base.options import Options
from nimblec.plan import plan_key

_software = plan_key._software


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model whose weights are in a file of their own."""
    return write_model(tmp_path / "m.onnx", external=True)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Options with a plan cache."""
    return Options(target="cpu", dims=(("n", 4),), timing_cache=tmp_path / "t.json", plan_cache=tmp_path / "plans")


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read what is installed once for all tests: reading takes half a second."""
    monkeypatch.setattr(plan_key, "_software", plan_key._software_at_first)


@pytest.fixture
def changing_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test change what is installed, as a new process for the key each time."""
    monkeypatch.setattr(plan_key, "_software", _software)
    monkeypatch.setattr(plan_key, "_software_at_first", _software)
    monkeypatch.setattr(plan_key, "_folders", plan_key._folders.__wrapped__)
