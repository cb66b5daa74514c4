"""ONNX's backend cases through the front end: no regression, no wrong result, no stale excuse.

``tests/onnx_known_failures.txt`` has one line for each case that does not pass; it is written by
``python bench/onnx_coverage.py --write-known tests/onnx_known_failures.txt``.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.onnx_cases import cases
from bench.onnx_coverage import Result, known_failures, run, run_case

KNOWN = known_failures(Path(__file__).parent / "onnx_known_failures.txt")
STRIDE = 7
"""Every seventh case runs by default: about 290."""

CORE_CASES_TO_PASS = 1600


def surprises(results: Sequence[Result]) -> list[str]:
    """Return the cases that fail unlisted, fail otherwise than listed, or pass although listed."""
    found = []
    for result in results:
        listed = KNOWN.get(result.name)
        if result.status == "pass" and listed is not None:
            found.append(f"{result.name} passes; take it off the list")
        elif result.status != "pass" and (listed is None or not listed.startswith(f"{result.status}: ")):
            found.append(f"{result.name}: {result.status}: {result.message}")
    return found


def test_every_known_failure_is_a_case_with_a_reason() -> None:
    names = {case.name for case in cases()}
    assert KNOWN.keys() <= names
    assert all(reason.partition(": ")[2] for reason in KNOWN.values())


def test_enough_core_cases_pass_and_none_goes_wrong() -> None:
    core = {case.name for case in cases() if case.core}
    assert len(core - KNOWN.keys()) >= CORE_CASES_TO_PASS
    assert not [line for line in KNOWN.values() if line.startswith(("wrong", "error", "crash", "hang"))]


def test_a_sample_of_the_cases_gives_what_the_list_says() -> None:
    assert not surprises([run_case(case, "aten") for case in cases()[::STRIDE]])


@pytest.mark.slow
def test_all_cases_give_what_the_list_says() -> None:
    assert not surprises(run(range(len(cases())), "aten", worker_count=2))
