"""ONNX's backend cases through both targets: no regression, no wrong result, no stale excuse.

``tests/onnx_known_failures.txt`` has one line for each case that the ATen front end does not pass, rewritten or not,
``tests/onnx_cpu_known_failures.txt`` one for each that ONNX Runtime passes and the CPU target does
not. ``python -m bench.onnx_coverage --target aten|cpu --write-known FILE`` writes them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx.reference.ops import op_pool_common
from onnx_cases import cases, made_quickly
from onnx_conformance import Result, is_excused, known_failures, run, run_case

KNOWN = known_failures(Path(__file__).parents[1] / "onnx_known_failures.txt")
CPU_KNOWN = known_failures(Path(__file__).parents[1] / "onnx_cpu_known_failures.txt")
STRIDES = {"aten": 11, "optimized": 11, "cpu": 43}
"""Every so manieth case runs by default: about 180 and 50."""

CORE_CASES_TO_PASS = 1660
BY_LIST = pytest.mark.parametrize("known", [KNOWN, CPU_KNOWN], ids=["aten", "cpu"])
BY_TARGET = pytest.mark.parametrize(
    ("target", "known"), [("aten", KNOWN), ("optimized", KNOWN), ("cpu", CPU_KNOWN)], ids=["aten", "optimized", "cpu"]
)


def surprises(results: Sequence[Result], known: Mapping[str, str]) -> list[str]:
    """Return the cases that fail unlisted, fail otherwise than listed, or pass although listed."""
    found = []
    for result in results:
        listed = known.get(result.name)
        if result.status == "pass" and listed is not None:
            found.append(f"{result.name} passes; take it off the list")
        elif result.status == "pass" or (is_excused(result) and listed is None):
            continue
        elif listed is None or not listed.startswith(f"{result.status}: "):
            found.append(f"{result.name}: {result.status}: {result.message}")
    return found


@pytest.mark.parametrize("kind", ["AVG", "MAX", "LPPOOL"])
@pytest.mark.parametrize("kernel", [(2,), (3, 2), (2, 1, 3)], ids=str)
def test_pooling_at_once_is_onnxs_window_after_window(kind: str, kernel: tuple[int, ...]) -> None:
    shape = (2, 3, *(5 for _ in kernel))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    given = x, shape, kernel, [1] * len(kernel), [6 - length for length in kernel], kind
    options = {"p": 3} if kind == "LPPOOL" else {}
    wanted = op_pool_common.pool(*given, **options)
    with made_quickly():
        found = op_pool_common.pool(*given, **options)
    # numpy rounds powers otherwise where it computes several at once, as with AVX-512.
    np.testing.assert_allclose(found, wanted, rtol=1e-6 if kind == "LPPOOL" else 0)


@BY_LIST
def test_every_known_failure_is_a_case_with_a_reason(known: Mapping[str, str]) -> None:
    names = {case.name for case in cases()}
    assert known.keys() <= names
    assert all(reason.partition(": ")[2] for reason in known.values())


@BY_LIST
def test_no_core_case_goes_wrong(known: Mapping[str, str]) -> None:
    assert not [line for line in known.values() if line.startswith(("wrong", "error", "crash", "hang"))]


def test_enough_core_cases_pass() -> None:
    assert len({case.name for case in cases() if case.core} - KNOWN.keys()) >= CORE_CASES_TO_PASS


def test_cpu_refuses_core_by_values() -> None:
    core = {case.name for case in cases() if case.core}
    reasons = [CPU_KNOWN[name] for name in core & CPU_KNOWN.keys()]
    assert all("whose size is not known" in reason or "the plan's bound is" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("status", "onnxruntime", "excused"),
    [
        ("refused", "pass", False),
        ("wrong", "pass", False),
        ("refused", "error", True),
        ("wrong", "wrong", False),
        ("error", "error", False),
        ("crash", "crash", False),
        ("wrong", "error", False),
        ("refused", "", False),
    ],
)
def test_who_is_excused_where_onnx_runtime_fails(status: str, onnxruntime: str, excused: bool) -> None:
    result = Result(name="", core=True, status=status, message="", onnxruntime=onnxruntime)
    assert is_excused(result) == excused


@BY_TARGET
def test_a_sample_of_the_cases_gives_what_the_list_says(target: str, known: Mapping[str, str]) -> None:
    assert not surprises([run_case(case, target) for case in cases()[:: STRIDES[target]]], known)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@BY_TARGET
def test_all_cases_give_what_the_list_says(target: str, known: Mapping[str, str]) -> None:
    assert not surprises(run(range(len(cases())), target, worker_count=2), known)
