"""The table of what running node by node costs on the CPU, from made-up figures and from a small model."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench import cpu_overhead
from bench.cpu_overhead import CASES, SETTINGS

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime")


def results(**changes: str) -> dict[str, Any]:
    times = {"one core": (4.0, 2.0), "all cores": (3.0, 2.0), "all cores, one pool": (1.0, 0.5)}
    settings = {
        name: {
            case: {"launches": 7, "plan_ms": {"median": ours}, "session_ms": {"median": theirs}, "bit_exact": True}
            for case in CASES
        }
        for name, (ours, theirs) in times.items()
    }
    commits = dict.fromkeys(SETTINGS, "abc") | changes
    return {"environment": {"gpu": "none", "cpu": "x"}, "settings": settings, "commits": commits}


def test_a_plan_of_the_shared_pool_is_compared_with_a_session_that_asks_for_nothing() -> None:
    _, _, first, *_, below = cpu_overhead.markdown(results()).splitlines()
    assert first == "| resnet18 64 px | 7 | 4.00 / 2.00 (2.00) | 3.00 / 2.00 (1.50) | 1.00 (0.50) |"
    assert below == "All results bit-exact: yes. Commit abc; x."


def test_settings_of_several_commits_make_no_table() -> None:
    with pytest.raises(SystemExit, match="rows of several commits: abc, def"):
        cpu_overhead.markdown(results(**{"one core": "def"}))


def test_calls_of_the_plan_and_of_the_session_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    cpu_overhead.export("bert", "", (), path)
    row = cpu_overhead.measure(path, 10, threads=1, shared=False)
    assert row["bit_exact"]
    assert row["launches"] > 10
    assert 0 < row["plan_ms"]["p5"] <= row["plan_ms"]["p95"]
    assert row["session_ms"]["p5"] > 0
