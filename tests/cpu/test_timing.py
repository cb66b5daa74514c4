"""Measuring plans on this CPU."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import nimblec
from nimblec.cpu.timing import CpuTimer
from nimblert.cpu import onnx_session

DIGITS = Path(__file__).parents[2] / "samples" / "digits.onnx"


def nodes(code: bytes) -> int:
    """The number of nodes in a model."""
    return len(onnx.load_model_from_string(code).graph.node)


def test_launches_are_timed_without_the_session_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session keeps packed copies of its weights: with one of all launches beside, there were two of each."""
    plan = nimblec.compile(DIGITS, target="cpu")
    opened: list[bytes] = []
    open_session = onnx_session.open_session

    def opening(code: bytes, *args: Any) -> object:
        opened.append(code)
        return open_session(code, *args)

    monkeypatch.setattr(onnx_session, "open_session", opening)
    timer = CpuTimer()
    assert len(timer.command_durations(plan)) == len(plan.programs[0].commands)
    assert {nodes(code) for code in opened} == {1}
    opened.clear()
    assert timer.duration(plan) > 0
    assert {nodes(code) for code in opened} == {len(plan.programs[0].commands)}
