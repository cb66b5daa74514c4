"""Which variant is kept, and that nothing of the others is, over recordings that take no GPU."""

import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nimblec.base.errors import TraceError, user_code
from nimblec.cuda.selection import Recorded, Selector
from nimblec.optimize.variants import Variant


class Captured:
    """A recording: memory on the GPU."""


class Notes(list[str]):
    """Reports that keep their notes."""

    def note(self, notes: Any) -> None:
        """Add notes."""
        self += notes


class Quick(Selector):
    """Records variants named by their nanoseconds; those named otherwise fail. ``alive`` counts recordings, before."""

    def __init__(self, notes: Notes, level: int) -> None:
        request: Any = SimpleNamespace(level=level, precision="keep")
        given: Any = notes
        nothing: Any = None
        super().__init__(request, given, nothing, nothing)
        self._captured: list[weakref.ref[Captured]] = []
        self.alive: list[int] = []

    def _record(self, variant: Variant) -> Recorded:
        self.alive.append(sum(captured() is not None for captured in self._captured))
        recording: Any = Captured()
        self._captured.append(weakref.ref(recording))
        if not variant.name.isdigit() and not variant.is_original:
            self._fail(variant.name)
        nothing: Any = None
        return Recorded(
            name=variant.name,
            model=nothing,
            recorder=nothing,
            recording=recording,
            part=nothing,
            duration_ns=int(variant.name) if variant.name.isdigit() else 0,
        )

    def _fail(self, name: str) -> None:
        with user_code(f"{name} fails"):
            int(name)


def test_a_signal_handler_ends_the_process_where_users_code_runs() -> None:
    """What it raises to that end is no error of the code, except where a module is imported for its name."""
    with pytest.raises(SystemExit), user_code("it fails"):
        sys.exit(3)
    with pytest.raises(TraceError, match=r"it fails: .*SystemExit: 3"), user_code("it fails", SystemExit):
        sys.exit(3)


def tried(*names: str) -> list[Variant]:
    """Variants of these names."""
    return [Variant(name=name, make=lambda: pytest.fail("made")) for name in names]


def test_selection_keeps_first_fastest() -> None:
    notes = Notes()
    selector = Quick(notes, 2)
    original: Any = None
    best = selector.fastest(original, tried("9000", "fails", "5000", "7000", "5000", "other"))
    assert best.duration_ns == 5000
    assert selector.alive == [0, 1, 1, 1, 1, 1]
    assert isinstance(best.recording, Captured)
    failed, other, times = notes
    assert failed.startswith("not possible for this model: fails: fails fails: ")
    assert other.startswith("not possible for this model: other: other fails: ")
    assert times == "tried 9000 9 us, 5000 5 us, 7000 7 us, 5000 5 us: kept the fastest"


def test_selection_tries_fallback() -> None:
    def last(*names: str) -> list[Variant]:
        *others, fallback = tried(*names)
        return [*others, replace(fallback, is_fallback=True)]

    original: Any = None
    selector = Quick(Notes(), 2)
    assert selector.fastest(original, last("9000", "5000")).duration_ns == 9000
    assert len(selector.alive) == 1
    assert Quick(Notes(), 2).fastest(original, last("fails", "5000")).duration_ns == 5000


def test_selection_compiles_model_as_it_runs() -> None:
    notes = Notes()
    selector = Quick(notes, 1)
    original: Any = None
    assert selector.fastest(original, tried("one", "two")).name == "as it runs"
    assert selector.alive == [0, 0, 0]
    assert notes[0] == "-O1 is not possible for this model, which is compiled as by -O0"
    with pytest.raises(TraceError, match="one fails"):
        Quick(notes, 0).fastest(original, tried("one", "two"))
