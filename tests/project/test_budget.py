"""Line budgets: raising one in pyproject.toml is a decision, with its reason in the commit."""

import tomllib

import pytest
from subprocesses import ROOT

BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budgets"]


@pytest.mark.parametrize("folder", BUDGETS)
def test_lines_of_each_folder_are_within_their_budget(folder: str) -> None:
    paths = (path for path in (ROOT / folder).rglob("*.py") if "_generated" not in path.parts)
    assert sum(len(path.read_bytes().splitlines()) for path in paths) <= BUDGETS[folder]
