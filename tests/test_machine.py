"""Measured times and the schedules tried are for the processors that a process may use, not for all there are."""

import os

import pytest

from nimblec.base.installation import processor
from nimblec.cpu.timing import CpuTimer


def test_fewer_processors_have_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for count in (1, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        names.append(processor())
        assert CpuTimer().max_streams == count
    one, four = names
    assert one.removesuffix(" x 1") == four.removesuffix(" x 4") != one
