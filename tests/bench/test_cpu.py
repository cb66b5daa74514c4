"""The table of what running node by node costs on the CPU, from made-up figures and from a small model."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench import cpu_overhead
from bench.cpu_overhead import CASES, SETTINGS

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="needs onnxruntime")


def results(**changes: str) -> dict[str, Any]:
    times = {"one core": (4.0, 2.0), "all cores": (3.0, 2.0)}
    settings = {
        name: {
            case: {
                "launches": 7,
                "plan_ms": {"median": ours},
                "session_ms": {"median": theirs},
                "ratio": {"median": ours / theirs},
                "least_ms": [ours, theirs * 2],
                "bit_exact": True,
            }
            for case in CASES
        }
        for name, (ours, theirs) in times.items()
    }
    commits = dict.fromkeys(SETTINGS, "abc") | changes
    return {"environment": {"gpu": "none", "cpu": "x"}, "settings": settings, "commits": commits}


def test_a_row_has_both_medians_and_both_ratios() -> None:
    _, _, first, *_, below = cpu_overhead.markdown(results()).splitlines()
    assert first == "| resnet18 64 px | 7 | 4.00 / 2.00 (2.00, 1.00) | 3.00 / 2.00 (1.50, 0.75) |"
    assert below.endswith("All results are equal bit for bit. Commit abc; x.")


def test_settings_of_several_commits_make_no_table() -> None:
    with pytest.raises(SystemExit, match="rows of several commits: abc, def"):
        cpu_overhead.markdown(results(**{"one core": "def"}))


def test_calls_of_the_plan_and_of_the_session_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    cpu_overhead.export("families.bert", "small", (), path)
    row = cpu_overhead.measure(path, 0.1, threads=1)
    assert row["bit_exact"]
    assert row["launches"] > 10
    assert 0 < row["plan_ms"]["p5"] <= row["plan_ms"]["p95"]
    assert row["session_ms"]["p5"] > 0
