"""The benchmark of scheduling, on small graphs."""

from typing import Any

from bench import schedule_scaling
from bench.schedule_scaling import POLICIES, layered, measure


def rows(*sizes: int) -> list[dict[str, Any]]:
    return [
        {"tasks": size, "policy": name, **measure(layered(size, 4, seed=0), POLICIES[name])}
        for size in sizes
        for name in ("1", "max")
    ]


def test_measure_tells_policies_apart() -> None:
    serial, maximal = rows(40)
    assert serial["streams"] == 1 < maximal["streams"]
    assert serial["waits"] == 0 < maximal["waits"]
    assert serial["arena_lower_bound_nbytes"] <= serial["arena_nbytes"] <= maximal["arena_nbytes"]


def test_markdown_has_the_growth_between_sizes() -> None:
    measured = rows(12, 24)
    for number, row in enumerate(measured, 1):
        row["seconds"] = dict.fromkeys(row["seconds"], 0.01 * number)
    environment = {"gpu": "none", "cpu": "x", "commit": "abc"}
    told = schedule_scaling.markdown({"rows": measured, "environment": environment})
    assert told.endswith("Growth between the two largest sizes: n^1.6 (1), n^1.0 (max). Commit abc; x.")
