"""Observed calls: an observer is told of each call once, with its program, and calls without one are as before."""

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_plans import bent_sum
from sized_plans import sized
from subprocesses import ROOT

import nimblert
from nimblert import Context, Executable, InputError, ObservedCall

X = np.ones(4, np.float32)


class Notes:
    """An observer that keeps calls, and the errors that they ended with."""

    def __init__(self) -> None:
        self.calls: list[ObservedCall] = []
        self.errors: list[str] = []

    @contextmanager
    def __call__(self, call: ObservedCall) -> Iterator[None]:
        """Keep the call."""
        self.calls.append(call)
        try:
            yield
        except Exception as exc:
            self.errors.append(type(exc).__name__)
            raise

    @property
    def programs(self) -> list[str | None]:
        """The name of the program of each call."""
        return [call.program and call.program.name for call in self.calls]


@pytest.fixture
def notes() -> Iterator[Notes]:
    made = Notes()
    nimblert.observe(made)
    yield made
    nimblert.observe(None)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Executable]:
    """Yield a model of tanh(x) + tanh(x)."""
    with nimblert.load(bent_sum(tmp_path)) as executable:
        yield executable


def rows(count: int) -> dict[str, np.ndarray]:
    """Return inputs of `sized`."""
    return {"x": np.zeros((count, 3), np.int32), "w": np.zeros((2, count), np.int32)}


CALLS: dict[str, Callable[[Context], Any]] = {
    "call": lambda context: context(X),
    "name": lambda context: context(x=X),
    "entry": lambda context: context.entry("main")(X),
    "run": lambda context: context.run({"x": X})["y"],
    "options": lambda context: context.run({"x": X}, out={"y": np.empty_like(X)}, reuse_outputs=True)["y"],
    "arun": lambda context: asyncio.run(context.arun({"x": X}))["y"],
}


@pytest.mark.parametrize("call", CALLS)
def test_observer_is_told_of_each_call_once(model: Executable, notes: Notes, call: str) -> None:
    context = model.context()
    for each in (model, context):
        for _ in range(3):  # the later ones are direct calls
            assert np.allclose(CALLS[call](each), 2 * np.tanh(1))
    assert [(one.entry, one.shapes, one.plan) for one in notes.calls] == [("main", {"x": (4,)}, model.plan)] * 6
    assert notes.programs == ["main"] * 6
    nimblert.observe(None)
    CALLS[call](model)
    assert len(notes.calls) == 6


def test_observer_replaces_the_last_one(model: Executable, notes: Notes) -> None:
    other = Notes()
    nimblert.observe(other)
    model(X)
    assert (len(notes.calls), len(other.calls)) == (0, 1)


def test_observe_refuses_what_cannot_be_called() -> None:
    with pytest.raises(InputError, match=r"^observer: got int, expected a function that returns a context manager$"):
        nimblert.observe(5)  # type: ignore[arg-type]


def test_observed_call_ends_with_its_error(model: Executable, notes: Notes) -> None:
    """A refused call has no program, whatever it is given."""
    for given in (np.ones(3, np.float32), [1.0], np.ndarray, None):
        with pytest.raises(InputError):
            model(given)
    for arrays in ({}, {"x": X, "z": X}, None):
        with pytest.raises(InputError):
            model.run(arrays)  # type: ignore[arg-type]
    assert notes.programs == [None] * 5 + ["main", None]
    assert notes.errors == ["InputError"] * 7
    assert np.allclose(model(X), 2 * np.tanh(1))


def test_observed_call_has_the_program_of_its_sizes(notes: Notes) -> None:
    with nimblert.load(sized(1, 4)) as model:
        for count in (1, 4, 3, 9):
            model.run(rows(count))
    assert notes.programs == ["main[rows=1]", "main[rows=4]", "main[rows=4]", "main[rows=1]"]
    assert [call.shapes["x"] for call in notes.calls] == [(1, 3), (4, 3), (3, 3), (9, 3)]


def test_observed_call_has_its_program_in_a_spare_context(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nimblert.cpu.streams.cores", lambda: 2)
    with nimblert.load(sized(1, 4)) as model, ThreadPoolExecutor(1) as threads:
        model.run(rows(4))
        with model._lock:  # as during another thread's call
            threads.submit(model.run, rows(1)).result(20)
        model.run(rows(4))
    assert notes.programs == ["main[rows=4]", "main[rows=1]", "main[rows=4]"]


def test_observed_call_has_the_program_of_bound_arrays(notes: Notes) -> None:
    with nimblert.load(sized(1, 4)) as model:
        given = rows(4)
        model.bind("x", given["x"])
        model.run({"w": given["w"]})
    assert notes.programs == ["main[rows=4]"]
    assert notes.calls[0].shapes == {"w": (2, 4)}


def test_example_of_the_guide_times_calls(model: Executable, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "observe" in block)
    try:
        exec(example, {"nimblert": nimblert})  # noqa: S102 - as a reader would run it
        model(X)
    finally:
        nimblert.observe(None)
    assert re.fullmatch(r"main \{'x': \(4,\)\} [\d.e-]+\n", capsys.readouterr().out)
