"""The benchmark of scheduling, on small graphs."""

from typing import Any

import pytest

from bench import schedule_scaling
from bench.schedule_scaling import POLICIES, layered, measure


def rows(*sizes: int) -> list[dict[str, Any]]:
    return [
        {"tasks": size, "policy": name, **measure(layered(size, 4, seed=0), POLICIES[name])}
        for size in sizes
        for name in ("1", "max")
    ]


def test_policies_differ_in_streams_and_arena() -> None:
    serial, maximal = rows(40)
    assert serial["streams"] == 1 < maximal["streams"]
    assert serial["waits"] == 0 < maximal["waits"]
    assert serial["arena_lower_bound_nbytes"] <= serial["arena_nbytes"] <= maximal["arena_nbytes"]


@pytest.mark.parametrize(("sizes", "grows"), [((12,), False), ((12, 24), True)])
def test_growth_is_told_between_two_sizes(sizes: tuple[int, ...], grows: bool) -> None:
    measured = rows(*sizes)
    for number, row in enumerate(measured, 1):
        row["seconds"] = dict.fromkeys(row["seconds"], 0.01 * number)
    environment = {"gpu": "none", "cpu": "x", "commit": "abc"}
    lines = schedule_scaling.markdown({"rows": measured, "environment": environment}).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(measured)
    growth = "Growth between the two largest sizes: n^1.6 (1), n^1.0 (max). " if grows else ""
    assert lines[-1] == f"{growth}Commit abc; x."
